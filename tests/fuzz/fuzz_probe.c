/* Any bytes as any of the kernel's files: no reader goes out of bounds, numbers are never those
 * that mean unknown or unlimited, and an unescaped text fits.
 *
 * The text is a copy of its exact size, so that a byte read beyond it is found. */
#include <stdlib.h>
#include <string.h>

#include "kit/check.h"
#include "core/port/probe.h"
#include "os/monitor/proctext.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void
read_numbers(mt_text text)
{
    uint64_t a = 0, b = 0;

    if (mt_statm_parse(text, &a, &b)) CHECK(b <= a && a < MT_UNLIMITED);
    if (mt_pressure_parse(text, &a)) CHECK(a <= 100000099);
    if (mt_limit_parse(text, &a)) CHECK(a < (uint64_t)1 << 62 || a == MT_UNLIMITED);
    if (mt_text_field(text, "MemTotal:", &a)) CHECK(a < MT_UNLIMITED);
    if (mt_stat_field(text, 22, &a)) CHECK(a < MT_UNLIMITED);
}

/* status, smaps_rollup and meminfo, of this process and of others; a list of children. */
static void
read_fields(mt_text text)
{
    static const char *const keys[] = {"VmSwap:",    "VmSize:",        "RssShmem:", "VmHWM:",
                                       "Anonymous:", "Private_Dirty:", "Pss_Anon:", "SwapTotal:"};
    uint64_t number, bytes;
    mt_text rest = text;

    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        bytes = mt_text_kib(text, keys[i]);
        CHECK(bytes == MT_UNKNOWN || (bytes < MT_UNLIMITED && bytes % 1024 == 0));
        if (bytes != MT_UNKNOWN)
            CHECK(mt_text_field(text, keys[i], &number) && bytes / 1024 == number);
    }
    while (mt_text_number(&rest, &number)) {
        CHECK(number < MT_UNLIMITED);
        CHECK(rest.at > text.at && rest.at + rest.len == text.at + text.len);
    }
}

static void
read_groups(mt_text text)
{
    mt_text line, path, rest = text;
    mt_cgroup_mount mount;
    mt_mapping mapping;
    char out[32];

    if (mt_cgroup_path(text, "memory", &path)) CHECK(path.len < text.len);
    if (mt_cgroup_path(text, "", &path)) CHECK(path.len < text.len);
    while (mt_text_line(&rest, &line)) {
        if (mt_mapping_parse(line, &mapping)) CHECK(mapping.start < mapping.end);
        CHECK(line.at >= text.at && line.at + line.len <= text.at + text.len);
        if (mt_cgroup_mount_parse(line, &mount)) CHECK(mount.point.len > 0);
        if (mt_text_unescape(line, out, sizeof out)) CHECK(strlen(out) < sizeof out);
    }
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const starts[] = {
        "",
        "some avg10=",
        "MemTotal:",
        "0::",
        "4:memory:",
        "1 2 3 / /p x - cgroup",
        "1 (x) S 1 2 3 4",
        "7f-80 rw-s 00 00:1b 22 /dev/shm/a (deleted)",
        "Name:\tx\nVmSize:\t 9 kB\nVmSwap:\t",
        "7f-80 ---p 00 00:00 0 [rollup]\nAnonymous: 4 kB\nPss_Anon:",
        "10 11 "};
    const char *start = size == 0 ? "" : starts[data[0] % (sizeof starts / sizeof *starts)];
    size_t head = strlen(start), len = head + (size > 0 ? size - 1 : 0);
    char *copy = malloc(len + (len == 0));

    CHECK(copy != NULL);
    memcpy(copy, start, head);
    if (size > 1) memcpy(copy + head, data + 1, size - 1);
    read_numbers((mt_text){copy, len});
    read_fields((mt_text){copy, len});
    read_groups((mt_text){copy, len});
    free(copy);
    return 0;
}
