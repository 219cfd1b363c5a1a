#include "py/census/maps.h"

#include <linux/magic.h>
#include <string.h>
#include <sys/vfs.h>

/* The fields of mmap.mmap as all Pythons from 3.11 on lay them out. */
typedef struct map_fields {
    PyObject_HEAD
    char *data;
    Py_ssize_t size, pos;
    off_t offset;
    Py_ssize_t exports;
    int fd; /* -1: there is no file, or it is not kept open */
#if PY_VERSION_HEX >= 0x030D0000
    bool keeps_fd;
#endif
} map_fields;

bool
mt_py_is_map(const PyTypeObject *type)
{
    return strcmp(type->tp_name, "mmap.mmap") == 0;
}

/* Whether the fields are those that the buffer protocol shows. */
static bool
is_laid_out_so(PyObject *op, const map_fields *map)
{
    Py_buffer view;
    bool is_so;

    if (PyObject_GetBuffer(op, &view, PyBUF_SIMPLE) < 0) {
        PyErr_Clear();
        return false;
    }
    is_so = view.buf == map->data && view.len == map->size;
    PyBuffer_Release(&view);
    return is_so;
}

static bool
is_in_memory(const map_fields *map)
{
    struct statfs is;

#if PY_VERSION_HEX >= 0x030D0000
    if (!map->keeps_fd) return false; /* its file is not known */
#endif
    if (map->fd < 0) return true;
    return fstatfs(map->fd, &is) == 0 && (is.f_type == TMPFS_MAGIC || is.f_type == HUGETLBFS_MAGIC);
}

uint64_t
mt_py_map_bytes(PyObject *op, const void **data)
{
    const map_fields *map = (const map_fields *)op;

    *data = NULL;
    if (!is_laid_out_so(op, map) || !is_in_memory(map)) return 0;
    *data = map->data;
    return (uint64_t)map->size;
}
