/* check.h -- the whole C test harness.
 *
 * A test program lists its cases in main() with RUN(case) and ends with CHECK_DONE(). A failed
 * CHECK prints where and what and ends the program with status 1. */
#ifndef MT_TESTS_KIT_CHECK_H
#define MT_TESTS_KIT_CHECK_H

#include <stdio.h>
#include <stdlib.h>

static int check_cases __attribute__((unused)); /* fuzz targets have checks, and no cases */

#define CHECK(cond)                                                                                \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "%s:%d: %s: CHECK failed: %s\n", __FILE__, __LINE__, __func__, #cond); \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

#define RUN(name)                                                                                  \
    do {                                                                                           \
        name();                                                                                    \
        check_cases++;                                                                             \
    } while (0)

#define CHECK_DONE()                                                                               \
    do {                                                                                           \
        printf("%s: %d passed, 0 failed\n", __FILE__, check_cases);                                \
        return 0;                                                                                  \
    } while (0)

#endif
