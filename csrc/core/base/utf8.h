/* utf8.h -- texts of a limited number of bytes. */
#ifndef MT_BASE_UTF8_H
#define MT_BASE_UTF8_H

#include <stddef.h>

/* How many of the bytes to keep so that at most `most` are left and no character is cut.
 * pre: the text is valid. */
size_t mt_utf8_cut(const char *text, size_t bytes, size_t most);

/* Length of what a field of `bytes` holds: up to the first zero byte, or all of it. */
size_t mt_utf8_field(const char *field, size_t bytes);

#endif
