#include "base/utf8.h"

#include <stdint.h>
#include <string.h>

/* Bytes of the character that `lead` begins, 0 for none, and the code point's first bits. */
static size_t
begin(unsigned char lead, uint32_t *code)
{
    if (lead < 0x80) return *code = lead, lead == 0 ? 0 : 1;
    if (lead >= 0xC2 && lead < 0xE0) return *code = lead & 0x1Fu, 2;
    if (lead >= 0xE0 && lead < 0xF0) return *code = lead & 0x0Fu, 3;
    if (lead >= 0xF0 && lead < 0xF5) return *code = lead & 0x07u, 4;
    return 0;
}

static bool
possible(uint32_t code, size_t bytes)
{
    if (bytes == 3) return code >= 0x800 && (code < 0xD800 || code > 0xDFFF);
    if (bytes == 4) return code >= 0x10000 && code <= 0x10FFFF;
    return true;
}

bool
mt_utf8_valid(const char *text, size_t bytes)
{
    const unsigned char *at = (const unsigned char *)text, *end = at + bytes;

    while (at < end) {
        uint32_t code;
        size_t n = begin(*at, &code);
        if (n == 0 || (size_t)(end - at) < n) return false;
        for (size_t i = 1; i < n; i++) {
            if ((at[i] & 0xC0) != 0x80) return false;
            code = code << 6 | (at[i] & 0x3Fu);
        }
        if (!possible(code, n)) return false;
        at += n;
    }
    return true;
}

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
