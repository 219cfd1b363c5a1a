/* blocks.c -- the bytes of Python's own small blocks: see blocks.h.
 *
 * sys.getallocatedblocks() counts them, and they have 16 to 512 bytes each: a list of numbers is
 * not a list of dicts. The interpreter knows the bytes too, and prints them in a text that is made
 * for people. */
#include "py/monitor/blocks.h"

#include <malloc.h>
#include <stdio.h>
#include <string.h>

enum { TEXT = 16384 }; /* bytes: it writes a line for each of 32 sizes, and some sums */

/* What sys._debugmallocstats() calls. A build without it has no such symbol, or does not show it. */
extern int _PyObject_DebugMallocStats(FILE *out) __attribute__((weak));

/* The number behind the `=` of a line, in which commas stand; false without one. */
static bool
number_in(const char *line, unsigned long long *out)
{
    const char *at = strchr(line, '=');
    bool found = false;

    if (at == NULL) return false;
    *out = 0;
    for (at++; *at != '\0' && *at != '\n'; at++) {
        if (*at < '0' || *at > '9') continue;
        *out = 10 * *out + (unsigned long long)(*at - '0');
        found = true;
    }
    return found;
}

PyObject *
mt_py_heap_bytes(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
#ifdef __GLIBC__
#if __GLIBC_PREREQ(2, 33)
    struct mallinfo2 heap = mallinfo2();

    return PyLong_FromSize_t(heap.uordblks + heap.hblkhd);
#endif
#endif
    Py_RETURN_NONE;
}

PyObject *
mt_py_python_bytes(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    char text[TEXT] = "";
    const char *line;
    unsigned long long bytes;
    FILE *file;

    if (_PyObject_DebugMallocStats == NULL) Py_RETURN_NONE;
    if ((file = fmemopen(text, sizeof text - 1, "w")) == NULL) Py_RETURN_NONE;
    (void)_PyObject_DebugMallocStats(file);
    (void)fclose(file);
    line = strstr(text, "# bytes in allocated blocks");
    if (line == NULL || !number_in(line, &bytes)) Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(bytes);
}
