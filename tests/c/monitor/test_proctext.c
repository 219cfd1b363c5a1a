/* What the kernel's text files say, also when they are cut, empty, or say something else. */
#include <string.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "kit/check.h"
#include "core/port/probe.h"
#include "os/monitor/proctext.h"

static mt_text
text_of(const char *at)
{
    return (mt_text){at, strlen(at)};
}

static void
a_number_is_digits_that_fit(void)
{
    static const char *const bad[] = {"",
                                      " ",
                                      "-1",
                                      "x",
                                      "+1",
                                      "18446744073709551616",
                                      "18446744073709551615",
                                      "18446744073709551614",
                                      "99999999999999999999999"};
    mt_text text = text_of(" \t18446744073709551613 7kB");
    uint64_t value;

    CHECK(mt_text_number(&text, &value) && value == MT_UNLIMITED - 1);
    CHECK(mt_text_number(&text, &value) && value == 7 && mt_text_is(text, "kB"));
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        text = text_of(bad[i]);
        CHECK(!mt_text_number(&text, &value));
    }
}

static void
a_field_is_found_at_the_start_of_a_line_only(void)
{
    mt_text text = text_of("MemTotal:   5 kB\nxVmHWM: 1\nVmHWM:\t  12 kB");
    uint64_t value;

    CHECK(mt_text_field(text, "VmHWM:", &value) && value == 12);
    CHECK(mt_text_field(text, "MemTotal:", &value) && value == 5);
    CHECK(!mt_text_field(text, "MemFree:", &value));
    CHECK(!mt_text_field(text_of("MemTotal:"), "MemTotal:", &value));
    CHECK(!mt_text_field(text_of("MemTotal: -5 kB"), "MemTotal:", &value));
    CHECK(!mt_text_field(text_of(""), "MemTotal:", &value));
}

static void
statm_is_its_second_and_third_number(void)
{
    uint64_t resident, shared, page = (uint64_t)sysconf(_SC_PAGESIZE);

    CHECK(mt_statm_parse(text_of("100 50 20 1 0 9 0\n"), &resident, &shared));
    CHECK(resident == 50 * page && shared == 20 * page);
    CHECK(!mt_statm_parse(text_of("100 20 50 1 0 9 0\n"), &resident, &shared));
    CHECK(!mt_statm_parse(text_of("100 -5 1 1 0 9 0\n"), &resident, &shared));
    CHECK(!mt_statm_parse(text_of("1 9223372036854775807 0 0 0 0 0\n"), &resident, &shared));
    CHECK(!mt_statm_parse(text_of(""), &resident, &shared));
}

static void
what_is_not_all_of_statm_is_none_of_it(void)
{
    static const char *const others[] = {"100 50 20",
                                         "100 50 20 1 0 9\n",
                                         "100 50 20 1 0 9 0",
                                         "100 50 20 1 0 9 0 0\n",
                                         "100 50 20 1 0 9 0 \n",
                                         "100 50 20 1 0 9 0\n\n",
                                         "100 50 20 1 5 9 0\n",
                                         "100 50 20 1 0 9 7\n",
                                         "1 2 1 4 5 6 7\n"};
    uint64_t resident, shared;

    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        CHECK(!mt_statm_parse(text_of(others[i]), &resident, &shared));
}

static void
pressure_is_of_the_line_some(void)
{
    static const char *const bad[] = {"",
                                      "some",
                                      "full avg10=0.00 total=1",
                                      "some avg10=1 total=2",
                                      "some avg10=1. total=2",
                                      "some total=3",
                                      "some avg10=-1.00 total=3",
                                      "some avg10=1.100 total=3",
                                      "some avg10=99999999.00 total=1"};
    uint64_t avg10;

    CHECK(mt_pressure_parse(text_of("some avg10=12.05 avg60=1.00 avg300=0.00 total=77\nfull x"),
                            &avg10));
    CHECK(avg10 == 1205);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK(!mt_pressure_parse(text_of(bad[i]), &avg10));
}

static void
a_limit_is_a_number_or_none(void)
{
    static const char *const bad[] = {"", "\n", "maximum", "-1", "12 kB", "lots"};
    uint64_t limit;

    CHECK(mt_limit_parse(text_of("4096\n"), &limit) && limit == 4096);
    CHECK(mt_limit_parse(text_of("4096"), &limit) && limit == 4096);
    CHECK(mt_limit_parse(text_of("0\n"), &limit) && limit == 0);
    CHECK(mt_limit_parse(text_of("max\n"), &limit) && limit == MT_UNLIMITED);
    CHECK(mt_limit_parse(text_of("max"), &limit) && limit == MT_UNLIMITED);
    CHECK(mt_limit_parse(text_of("9223372036854771712\n"), &limit) && limit == MT_UNLIMITED);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK(!mt_limit_parse(text_of(bad[i]), &limit));
}

static void
a_group_is_found_by_its_controller(void)
{
    mt_text text = text_of("9:name=systemd:/s\n4:cpu,memory:/a:b\n0::/u\n"), path;

    CHECK(mt_cgroup_path(text, "memory", &path) && mt_text_is(path, "/a:b"));
    CHECK(mt_cgroup_path(text, "", &path) && mt_text_is(path, "/u"));
    CHECK(!mt_cgroup_path(text, "mem", &path) && !mt_cgroup_path(text, "pids", &path));
    CHECK(!mt_cgroup_path(text_of("memory\n4:memory\n::"), "memory", &path));
}

static void
a_mount_is_told_by_its_type(void)
{
    mt_cgroup_mount mount;

    CHECK(mt_cgroup_mount_parse(
        text_of("35 31 0:32 /top /sys/a\\040b rw shared:9 master:1 - cgroup cgroup rw,memory"),
        &mount));
    CHECK(mount.memory && !mount.v2 && mt_text_is(mount.top, "/top"));
    CHECK(mt_text_is(mount.point, "/sys/a\\040b"));
    CHECK(mt_cgroup_mount_parse(text_of("1 2 0:3 / /c rw - cgroup2 none rw,memory"), &mount));
    CHECK(mount.v2 && !mount.memory);
    CHECK(mt_cgroup_mount_parse(text_of("1 2 0:3 / /c rw - cgroup x rw,cpu"), &mount));
    CHECK(!mount.memory);
    CHECK(!mt_cgroup_mount_parse(text_of("1 2 0:3 / /c rw - ext4 x rw,memory"), &mount));
    CHECK(!mt_cgroup_mount_parse(text_of("1 2 0:3 / - cgroup2"), &mount));
    CHECK(!mt_cgroup_mount_parse(text_of("1 2 0:3 / /c rw"), &mount));
    CHECK(!mt_cgroup_mount_parse(text_of(""), &mount));
}

static void
an_escape_is_undone_and_never_overflows(void)
{
    char out[8];

    CHECK(mt_text_unescape(text_of("a\\040b\\"), out, sizeof out) && strcmp(out, "a b\\") == 0);
    CHECK(mt_text_unescape(text_of("1234567"), out, sizeof out));
    CHECK(!mt_text_unescape(text_of("12345678"), out, sizeof out));
    CHECK(!mt_text_unescape(text_of("a\\000b"), out, sizeof out));
    CHECK(mt_text_unescape(text_of("\\04"), out, sizeof out) && strcmp(out, "\\04") == 0);
    CHECK(!mt_text_unescape(text_of(""), out, 0));
}

static void
a_field_of_stat_stands_behind_any_name(void)
{
    uint64_t n;

    CHECK(mt_stat_field(text_of("1 (a) b) c) S 2 -3 4\n"), 4, &n) && n == 2);
    CHECK(!mt_stat_field(text_of("1 (a) S 2 -3 4\n"), 5, &n)); /* it is below 0 */
    CHECK(mt_stat_field(text_of("1 (a) S 2 -3 4\n"), 6, &n) && n == 4);
    CHECK(!mt_stat_field(text_of("1 (a) S 2 -3 4\n"), 7, &n) &&
          !mt_stat_field(text_of("1 a S 2"), 4, &n));
    CHECK(!mt_stat_field(text_of("1 (a)"), 3, &n) && !mt_stat_field(text_of(""), 3, &n));
}

static void
a_line_of_maps_is_a_mapping(void)
{
    static const char *const bad[] = {"",
                                      "7f-80",
                                      "7f-80 rw-s",
                                      "80-7f rw-s 0 0:1 2",
                                      "7f-80 rw-s 0 0:1 ",
                                      "7f-80 rws 0 0:1 2",
                                      "-80 rw-s 0 0:1 2",
                                      "7g-80 rw-s 0 0:1 2",
                                      "11111111111111111-2 rw-s 0 0:1 2",
                                      "7f-80 rw-s 0 100000000:1 2",
                                      "7f-80 rw-s ffffffffffffffff 0:1 2"};
    mt_mapping m;

    CHECK(mt_mapping_parse(text_of("7f00-8000 rw-s 00001000 01:1b 22891    /dev/shm/a b"), &m));
    CHECK(m.start == 0x7f00 && m.end == 0x8000 && m.offset == 0x1000 && m.inode == 22891);
    CHECK(m.device == makedev(1, 0x1b) && !m.deleted);
    CHECK(mt_mapping_parse(text_of("7f-80 rw-s 0 0:1 5 /dev/zero (deleted)"), &m) && m.deleted);
    CHECK(mt_mapping_parse(text_of("7f-80 rw-p 00000000 00:00 0"), &m) && m.inode == 0);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK(!mt_mapping_parse(text_of(bad[i]), &m));
}

int
main(void)
{
    RUN(a_number_is_digits_that_fit);
    RUN(a_field_is_found_at_the_start_of_a_line_only);
    RUN(statm_is_its_second_and_third_number);
    RUN(what_is_not_all_of_statm_is_none_of_it);
    RUN(pressure_is_of_the_line_some);
    RUN(a_limit_is_a_number_or_none);
    RUN(a_group_is_found_by_its_controller);
    RUN(a_mount_is_told_by_its_type);
    RUN(an_escape_is_undone_and_never_overflows);
    RUN(a_field_of_stat_stands_behind_any_name);
    RUN(a_line_of_maps_is_a_mapping);
    CHECK_DONE();
}
