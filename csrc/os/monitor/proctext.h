/* proctext.h -- what the kernel's text files say, as numbers.
 *
 * Pure functions over bytes that need no end mark: files may be cut, empty or say something else
 * altogether. A number is decimal digits up to UINT64_MAX - 2 (the two above are MT_UNKNOWN and
 * MT_UNLIMITED); a minus sign, a larger number or none makes the whole reading false, and the
 * outputs are then undefined. No locale, no allocation. */
#ifndef MT_OS_MONITOR_PROCTEXT_H
#define MT_OS_MONITOR_PROCTEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct mt_text {
    const char *at;
    size_t len;
} mt_text;

/* The next line without its newline, which is taken off the text; false at its end. */
bool mt_text_line(mt_text *text, mt_text *line);
/* The next word up to `end`, which is taken off with it; the last word needs no `end`. */
bool mt_text_word(mt_text *text, char end, mt_text *word);
bool mt_text_is(mt_text text, const char *word);
bool mt_text_starts(mt_text text, const char *word);

/* Skips blanks, takes a number off the text. */
bool mt_text_number(mt_text *text, uint64_t *out);
/* The number after `key` where a line starts with it: ("VmHWM:", ...). */
bool mt_text_field(mt_text text, const char *key, uint64_t *out);
/* The same for a number of KiB ("VmHWM:      123 kB"), in bytes; MT_UNKNOWN where there is none. */
uint64_t mt_text_kib(mt_text text, const char *key);

/* statm: bytes that are resident, and those of them that are of files or shared. False for all but
 * its one line of seven numbers of pages, of which the fifth and the last are always 0. */
bool mt_statm_parse(mt_text text, uint64_t *resident, uint64_t *shared);
/* A field of /proc/<pid>/stat that is a number of 0 or more, by the number that it has in proc(5),
 * from 3 on. */
bool mt_stat_field(mt_text text, int field, uint64_t *out);
/* A line of /proc/<pid>/maps. */
typedef struct mt_mapping {
    uint64_t start, end; /* addresses: start < end */
    uint64_t offset;     /* in the file */
    uint64_t device, inode;
    bool deleted; /* the file has no name any more */
} mt_mapping;
bool mt_mapping_parse(mt_text line, mt_mapping *out);
/* memory.pressure: avg10 of the line "some avg10=0.25 ... total=123", in 1/100 percent. */
bool mt_pressure_parse(mt_text text, uint64_t *avg10);
/* memory.max and memory.limit_in_bytes; MT_UNLIMITED for "max" and for v1's huge number. */
bool mt_limit_parse(mt_text text, uint64_t *out);

/* The path of this process's group from /proc/self/cgroup; `controller` "" is the v2 hierarchy. */
bool mt_cgroup_path(mt_text text, const char *controller, mt_text *path);

/* A mounted control-group file system; top and point are still escaped. */
typedef struct mt_cgroup_mount {
    mt_text top;   /* which group is visible at the mount point */
    mt_text point; /* where */
    bool memory;   /* v1: it has the memory controller */
    bool v2;
} mt_cgroup_mount;

/* A line of /proc/self/mountinfo; false if it is not a control-group file system. */
bool mt_cgroup_mount_parse(mt_text line, mt_cgroup_mount *out);

/* Writes a mountinfo field with its octal escapes ("\040") undone, and a final 0. False when it
 * does not fit or holds a 0 byte. */
bool mt_text_unescape(mt_text text, char *out, size_t room);

#endif
