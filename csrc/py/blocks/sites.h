/* sites.h -- which lines of a program a thread is in, as one number.
 *
 *   frames of the thread, innermost first            places                       sites
 *   torch/nn/functional.py:1234  relu      ──►  0  (not the user's)
 *   model.py:31                  forward   ──►  1  model.py:31 in forward   ┐
 *   torch/nn/modules/module.py   _call     ──►  2  (not the user's)         ├──► 5 = (1, 3, 4)
 *   train.py:47                  step      ──►  3  train.py:47 in step      │
 *   train.py:90                  main      ──►  4  train.py:90 in main      ┘
 *
 * A site is up to three frames of the user's own code; where there are none, the innermost frame of
 * a library. The call of a trainer is the line of all that a training does: frames outside of it
 * are not looked at, and inside of it the innermost frame of a library is one that is not torch's.
 * A site is found without the GIL: a thread's own frames stand still while it is in C, so they are
 * read as they lie, and nothing of Python is called, changed or kept. The file, the function and
 * the line of a place are copied when it is seen for the first time; later it is known by its code
 * object and its instruction: some 10 ns for each frame.
 *
 * The frames of Python 3.11 to 3.13 are known. With another version there is only site 0, the site of
 * blocks that no Python code has allocated. */
#ifndef MT_PY_BLOCKS_SITES_H
#define MT_PY_BLOCKS_SITES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/index.h"
#include "core/base/lock.h"

enum { MT_SITE_FRAMES = 3 };

typedef struct mt_place mt_place;
typedef struct mt_site mt_site;

/* Places or sites, each once. The first one is none. */
typedef struct mt_site_table {
    void *entries;
    size_t n, room;
    mt_index index;
} mt_site_table;

typedef struct mt_sites {
    mt_lock lock;
    mt_site_table places, all; /* of mt_place, and of mt_site */
    char **texts; /* folders of the user, then of libraries, then the methods of trainers */
    size_t users_n, folders_n, texts_n;
} mt_sites;

void mt_sites_init(mt_sites *sites);

/* Forgets all sites; those that are known by their number are so no longer. With the GIL: libraries
 * is a tuple of str, the folders whose files are not the user's code, but for those of `users`, a
 * tuple as well. Files without a name (<string>) and those that torch.compile writes never are.
 * Each of `entries`, a tuple too, is a method by which programs enter a trainer, as
 * "/transformers/trainer.py:Trainer.train". -1 with an error; then there are none. */
int mt_sites_reset(mt_sites *sites, PyObject *libraries, PyObject *users, PyObject *entries);

/* The site of the calling thread, which may or may not hold the GIL; 0 where it runs no Python, and
 * without memory. */
uint32_t mt_sites_here(mt_sites *sites);

/* How many there are, 0 included. */
size_t mt_sites_count(mt_sites *sites);

/* With the GIL: ((file, line, function), ...) of a site, the innermost first; () for one that is not
 * known. NULL with an error. */
PyObject *mt_sites_frames(mt_sites *sites, uint32_t site);

#endif
