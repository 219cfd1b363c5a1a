#include "base/utf8.h"

#include <string.h>

size_t
mt_utf8_cut(const char *text, size_t bytes, size_t most)
{
    if (bytes <= most) return bytes;
    while (most > 0 && ((unsigned char)text[most] & 0xC0) == 0x80)
        most--;
    return most;
}

size_t
mt_utf8_field(const char *field, size_t bytes)
{
    const char *zero = memchr(field, 0, bytes);

    return zero == NULL ? bytes : (size_t)(zero - field);
}
