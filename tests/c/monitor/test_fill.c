/* How fast something fills: what rises for certain, and what only goes up and down. */
#include "core/base/size.h"
#include "core/monitor/fill.h"
#include "kit/check.h"

#define SECOND ((uint64_t)1000000000)

static mt_fill_reading
reading(uint64_t second, uint64_t bytes)
{
    return (mt_fill_reading){second * SECOND, 10 * second, bytes};
}

static void
a_rise_is_told_from_the_eighth_reading_on(void)
{
    mt_fill_reading rise;
    mt_fill f = {0};

    CHECK(!mt_fill_rise(&f, &rise));
    for (uint64_t i = 0; i < 8; i++) {
        CHECK(!mt_fill_rise(&f, &rise));
        mt_fill_add(&f, reading(5 + i, 100 + 3 * i));
        for (uint64_t part = 1; part < 10; part++) /* too soon after it */
            mt_fill_add(&f, (mt_fill_reading){(5 + i) * SECOND + part * SECOND / 10, 0, 0});
    }
    CHECK(mt_fill_rise(&f, &rise));
    CHECK(rise.bytes == 21 && rise.time_ns == 7 * SECOND && rise.steps == 70);
}

static void
only_the_newest_readings_count(void)
{
    mt_fill_reading rise;
    mt_fill f = {0};

    for (uint64_t i = 0; i < 100; i++)
        mt_fill_add(&f, reading(i, 1000 - i));
    CHECK(!mt_fill_rise(&f, &rise));
    for (uint64_t i = 100; i < 131; i++)
        mt_fill_add(&f, reading(i, 1000 + 2 * i));
    CHECK(mt_fill_rise(&f, &rise)); /* of the fall one reading is left */
    mt_fill_add(&f, reading(131, 1262));
    CHECK(mt_fill_rise(&f, &rise) && rise.bytes == 62 && rise.time_ns == 31 * SECOND);
}

static void
what_is_level_or_goes_up_and_down_does_not_rise(void)
{
    mt_fill level = {0}, saw = {0}, step = {0}, noisy = {0};
    mt_fill_reading rise;

    for (uint64_t i = 0; i < 40; i++) {
        mt_fill_add(&level, reading(i, 7));
        mt_fill_add(&saw, reading(i, i % 8));
        mt_fill_add(&step, reading(i, i < 20 ? 5 : 9));
        mt_fill_add(&noisy, reading(i, 10 * i + i % 3 * 8));
    }
    CHECK(!mt_fill_rise(&level, &rise) && !mt_fill_rise(&saw, &rise));
    CHECK(!mt_fill_rise(&step, &rise));
    CHECK(mt_fill_rise(&noisy, &rise)); /* it does, for all that a third of them falls */
}

static void
what_is_not_known_begins_anew(void)
{
    mt_fill_reading rise;
    mt_fill f = {0};

    for (uint64_t i = 0; i < 10; i++)
        mt_fill_add(&f, reading(i, i));
    CHECK(mt_fill_rise(&f, &rise));
    mt_fill_add(&f, reading(10, MT_UNKNOWN));
    CHECK(!mt_fill_rise(&f, &rise) && f.len == 0);
}

int
main(void)
{
    RUN(a_rise_is_told_from_the_eighth_reading_on);
    RUN(only_the_newest_readings_count);
    RUN(what_is_level_or_goes_up_and_down_does_not_rise);
    RUN(what_is_not_known_begins_anew);
    CHECK_DONE();
}
