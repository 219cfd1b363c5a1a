/* probe.h -- one reading of what memory a process has, and the table by which it is taken.
 *
 *   mask (what to read) ──► mt_probe_ops.read ──► mt_sample     every field a number of bytes, or
 *                                                               MT_UNKNOWN where it was not to be
 *                                                               had, or not asked for
 *
 * csrc/os fills the table from /proc and the control groups; tests with made-up series. A probe has
 * no lock: one thread uses it at a time. Reading never fails as a whole; what cannot be read is
 * MT_UNKNOWN, and a limit that is not set is MT_UNLIMITED, which is another thing. */
#ifndef MT_PORT_PROBE_H
#define MT_PORT_PROBE_H

#include <stddef.h>
#include <stdint.h>

#include "base/gauge.h"
#include "base/size.h"

/* What to read. The costs are those of a bare system call each, except where it says otherwise. */
typedef enum mt_read {
    MT_READ_RSS = 1,       /* rss, priv: one file of 30 bytes */
    MT_READ_CGROUP = 2,    /* cgroup_used, cgroup_limit */
    MT_READ_PRESSURE = 4,  /* pressure */
    MT_READ_SYSTEM = 8,    /* available, total, swap_free */
    MT_READ_SWAP = 16,     /* swap: where the machine has any, a slower file of 1.5 kB */
    MT_READ_HEAP = 32,     /* heap_used, heap_free: up to milliseconds where the heap is full of
                            * holes, because the allocator counts them one by one */
    MT_READ_CHILDREN = 64, /* children, children_priv: a call for each child, and now and then a
                            * slow file of one of them; children_swap: where the machine has swap,
                            * a slower file of 1.5 kB of each */
    MT_READ_DEVICES = 128, /* the device columns */
    MT_READ_SHM =
        256, /* shm, shm_mapped: a call for each descriptor of the job, and where it maps shared memory its list of mappings */
    MT_READ_ALL = 511,
    MT_READ_LAST = 512, /* what children have alone is found out for each, as far as 50 ms go: no
                         * later reading will */
    MT_READ_HOST = 1 | 2 | 4 | 8 | 16, /* the usual sample */
} mt_read;

enum { MT_SAMPLE_DEVICES = 8 };

typedef struct mt_device_sample {
    uint64_t allocated;      /* in tensors, as the allocator counts them */
    uint64_t allocated_peak; /* the most that was allocated since the program last reset torch's
                              * peak; MT_UNKNOWN where unknown */
    uint64_t reserved;       /* that the allocator has from the driver */
    uint64_t free;           /* that the driver has left for all processes */
    uint64_t total;
    uint64_t inactive_split; /* reserved, not allocated, and in blocks that are partly in use */
} mt_device_sample;

typedef struct mt_sample {
    uint64_t time_ns;              /* monotonic */
    uint64_t rss;                  /* resident bytes of this process */
    uint64_t priv;                 /* of it, neither of a file nor shared memory */
    uint64_t swap;                 /* of this process, swapped out */
    uint64_t heap_used, heap_free; /* of malloc, mapped blocks included: handed out, and idle */
    uint64_t cgroup_used;          /* that the limit counts, less file cache that is easily dropped,
                                    * of the group that states the limit */
    uint64_t cgroup_limit; /* the lowest over the group and its ancestors, or MT_UNLIMITED */
    uint64_t pressure;     /* PSI "some", average of 10 s, in 1/100 percent */
    uint64_t available, total, swap_free; /* of the machine */
    uint64_t children;                    /* living descendants */
    uint64_t children_priv;               /* their private bytes in sum: what is of no file, no
                                           * shared memory, and no longer their parent's as well */
    uint64_t shm; /* shared memory of the job, this process and its descendants: its files in
                   * /dev/shm, mapped or not, and what it shares without a name; each page once */
    uint64_t mapped_again;  /* bytes that rss counts more than once, because this process maps the
                            * same page at several addresses (see gauge.h). No file has it: the
                            * reader of the sample fills it in */
    uint64_t children_swap; /* of all children, swapped out */
    uint64_t shm_mapped; /* of shm, what rss counts: a page once for each address that it is at */
    uint64_t devices;    /* columns filled in `device`; those beyond are undefined */
    mt_device_sample device[MT_SAMPLE_DEVICES];
    uint64_t weighing_ns; /* processor time of this reading that has an allowance of its own, of
                           * 0.3 % of a core: it found out what forked children have alone */
} mt_sample;

/* Everything MT_UNKNOWN, and no device. */
void mt_sample_clear(mt_sample *out);

/* Fills in mapped_again, after rss and priv. */
void mt_sample_count_once(mt_sample *x, mt_gauge *mapped_again);

/* What the process itself fills of memory: rss, each page counted once. MT_UNKNOWN as rss is. */
uint64_t mt_sample_process(const mt_sample *x);

/* What the job fills, this process with its descendants, each page once: what the process fills but
 * for shared memory, the private bytes of the descendants, the shared memory of all, and what of it
 * all is swapped out. What is not known of them counts as nothing; MT_UNKNOWN as rss is. */
uint64_t mt_sample_job(const mt_sample *x);

/* Of it, what is swapped out of this process and its descendants; shared memory is in `shm`, swapped
 * out or not. MT_UNKNOWN where either is. */
uint64_t mt_sample_job_swap(const mt_sample *x);

typedef struct mt_probe_ops {
    /* Reads what `mask` asks for and the time; the other fields are MT_UNKNOWN. */
    void (*read)(void *ctx, unsigned mask, mt_sample *out);
    /* Closes the probe. NULL ctx is ignored. */
    void (*close)(void *ctx);
    void *ctx;
} mt_probe_ops;

#endif
