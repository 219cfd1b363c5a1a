/* status.h -- how core functions fail.
 *
 * A fault of the world (memory, a limit, a device, a file's bytes) comes back as an mt_status, and
 * mt_error says which call failed with which numbers. A caller's bug is an assert. Nothing here
 * prints or exits; the binding turns one mt_error into one Python exception. */
#ifndef MT_BASE_STATUS_H
#define MT_BASE_STATUS_H

#include <stddef.h>

typedef enum mt_status {
    MT_OK = 0,
    MT_ENOMEM,    /* an allocator or the OS had no memory */
    MT_EOVERFLOW, /* a size does not fit size_t */
    MT_ELIMIT,    /* a configured budget would be exceeded */
    MT_EDEVICE,   /* a driver call failed; mt_error.native is its code */
    MT_EFORMAT,   /* bytes that are not what they claim to be */
    MT_ESHAPE,    /* a tensor, row or page of a size that cannot be taken; mt_error.shape */
    MT_EAGAIN,    /* nothing is wrong, but not now */
    MT_EFILE,     /* a file cannot be made, read or mapped; `native` is the errno of `call` */
} mt_status;

/* Which size cannot be taken, for MT_ESHAPE. */
typedef enum mt_shape {
    MT_SHAPE_ROWS,
    MT_SHAPE_COLUMNS,
    MT_SHAPE_EXPERTS,
    MT_SHAPE_TOP_K,
    MT_SHAPE_TOKENS,
    MT_SHAPE_PAGE_BYTES,
} mt_shape;

/* Filled on failure only; `call` and `detail` point to static text. */
typedef struct mt_error {
    mt_status status;
    int native;         /* errno or the driver's code, 0 when there is none */
    const char *call;   /* the call that failed: "mmap", "cudaMemcpyAsync" */
    const char *detail; /* what is wrong, in words; NULL where the status says it all */
    mt_shape shape;     /* for MT_ESHAPE */
    size_t asked;       /* bytes for MT_ELIMIT, a count for MT_ESHAPE */
    size_t used;
    size_t limit;
} mt_error;

/* Fills *err (which may be NULL) and returns st, so that a failure is one line. */
mt_status mt_fail(mt_error *err, mt_status st, const char *call, int native);

/* The same for a budget: MT_ELIMIT with its three numbers. */
mt_status mt_fail_limit(mt_error *err, size_t asked, size_t used, size_t limit);

/* The same for a size that cannot be taken: MT_ESHAPE with what was asked and what is possible. */
mt_status mt_fail_shape(mt_error *err, mt_shape shape, size_t asked, size_t limit);

/* The same for bytes that do not parse: MT_EFORMAT with what was wrong. */
mt_status mt_fail_format(mt_error *err, const char *detail);

/* The enumerator's name as text, for messages and tests; never NULL. */
const char *mt_status_name(mt_status st);

#endif
