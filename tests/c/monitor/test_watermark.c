/* Watermarks: told once for each rise. */
#include "kit/check.h"
#include "core/monitor/watermark.h"

static void
a_mark_is_told_once_until_memory_fell_below_it(void)
{
    mt_watermarks m = {.armed = 0};

    CHECK(mt_watermarks_add(&m, MT_MARK_HOST, 0.9) == 0 &&
          mt_watermarks_add(&m, MT_MARK_HOST, 0.5) == 1);
    CHECK(mt_watermarks_look(&m, MT_MARK_HOST, 49, 100) == 0);
    CHECK(mt_watermarks_look(&m, MT_MARK_HOST, 50, 100) == 2 &&
          mt_watermarks_look(&m, MT_MARK_HOST, 60, 100) == 0);
    CHECK(mt_watermarks_look(&m, MT_MARK_HOST, 95, 100) == 1);
    CHECK(mt_watermarks_look(&m, MT_MARK_HOST, 86, 100) == 0 &&
          mt_watermarks_look(&m, MT_MARK_HOST, 95, 100) == 0);
    CHECK(mt_watermarks_look(&m, MT_MARK_HOST, 85, 100) == 0 &&
          mt_watermarks_look(&m, MT_MARK_HOST, 95, 100) == 1);
    CHECK(mt_watermarks_look(&m, MT_MARK_HOST, 0, 100) == 0 &&
          mt_watermarks_look(&m, MT_MARK_HOST, 100, 100) == 3);
    CHECK(mt_watermarks_look(&m, MT_MARK_HOST, 100, 1000) == 0 &&
          mt_watermarks_look(&m, MT_MARK_HOST, 100, 90) == 3); /* the limit moved */
}

static void
a_place_is_used_again_and_a_new_mark_is_armed(void)
{
    mt_watermarks m = {.armed = 0};

    for (int i = 0; i < MT_WATERMARKS; i++)
        CHECK(mt_watermarks_add(&m, MT_MARK_HOST, 0.5) == i);
    CHECK(mt_watermarks_add(&m, MT_MARK_HOST, 0.5) == -1);
    CHECK(mt_watermarks_look(&m, MT_MARK_HOST, 9, 10) == UINT32_MAX &&
          mt_watermarks_look(&m, MT_MARK_HOST, 9, 10) == 0);
    CHECK(mt_watermarks_remove(&m, 31) && !mt_watermarks_remove(&m, 31) &&
          !mt_watermarks_remove(&m, 32));
    CHECK(mt_watermarks_look(&m, MT_MARK_HOST, 0, 10) == 0 &&
          mt_watermarks_look(&m, MT_MARK_HOST, 9, 10) == UINT32_MAX >> 1);
    CHECK(mt_watermarks_add(&m, MT_MARK_HOST, 0.5) == 31 &&
          mt_watermarks_look(&m, MT_MARK_HOST, 9, 10) == 1u << 31);
}

static void
each_memory_has_marks_of_its_own(void)
{
    mt_watermarks m = {.armed = 0};

    CHECK(mt_watermarks_add(&m, MT_MARK_HOST, 0.5) == 0);
    CHECK(mt_watermarks_add(&m, MT_MARK_DEVICE, 0.5) == 1);
    CHECK(mt_watermarks_add(&m, MT_MARK_DEVICE + 7, 0.5) == 2);
    CHECK(mt_watermarks_look(&m, MT_MARK_DEVICE, 60, 100) == 2);
    CHECK(mt_watermarks_look(&m, MT_MARK_HOST, 40, 100) == 0); /* arms nobody else's */
    CHECK(mt_watermarks_look(&m, MT_MARK_DEVICE, 60, 100) == 0);
    CHECK(mt_watermarks_look(&m, MT_MARK_HOST, 60, 100) == 1);
    CHECK(mt_watermarks_look(&m, MT_MARK_DEVICE + 7, 60, 100) == 4);
    CHECK(mt_watermarks_remove(&m, 1) && mt_watermarks_add(&m, MT_MARK_HOST, 0.9) == 1);
    CHECK(mt_watermarks_look(&m, MT_MARK_DEVICE, 99, 100) == 0); /* the place is another's now */
    CHECK(mt_watermarks_look(&m, MT_MARK_HOST, 99, 100) == 2);
}

int
main(void)
{
    RUN(a_mark_is_told_once_until_memory_fell_below_it);
    RUN(a_place_is_used_again_and_a_new_mark_is_armed);
    RUN(each_memory_has_marks_of_its_own);
    CHECK_DONE();
}
