/* proctext.c -- how this file works.
 *
 * A text is a pointer and a length; words, lines and numbers are taken off its front, so that the
 * same few functions read every file: mt_text_word takes up to a separator, mt_text_number takes
 * digits. What follows them is one function for each of the kernel's formats. */
#include "os/monitor/proctext.h"

#include <string.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "core/port/probe.h"

bool
mt_text_word(mt_text *text, char end, mt_text *word)
{
    const char *stop;

    if (text->len == 0) return false;
    stop = memchr(text->at, end, text->len);
    word->at = text->at;
    word->len = stop == NULL ? text->len : (size_t)(stop - text->at);
    text->at += word->len + (stop != NULL);
    text->len -= word->len + (stop != NULL);
    return true;
}

bool
mt_text_line(mt_text *text, mt_text *line)
{
    return mt_text_word(text, '\n', line);
}

bool
mt_text_starts(mt_text text, const char *word)
{
    size_t len = strlen(word);

    return text.len >= len && memcmp(text.at, word, len) == 0;
}

bool
mt_text_is(mt_text text, const char *word)
{
    return text.len == strlen(word) && mt_text_starts(text, word);
}

/* Is `word` one of the words of a list that commas separate? */
static bool
is_listed(mt_text list, const char *word)
{
    mt_text one;

    while (mt_text_word(&list, ',', &one)) {
        if (mt_text_is(one, word)) return true;
    }
    return false;
}

bool
mt_text_number(mt_text *text, uint64_t *out)
{
    const char *at = text->at, *end = at + text->len;
    uint64_t value = 0;
    const char *first;

    while (at < end && (*at == ' ' || *at == '\t'))
        at++;
    for (first = at; at < end && *at >= '0' && *at <= '9'; at++) {
        uint64_t digit = (uint64_t)(*at - '0');
        if (value > (MT_UNLIMITED - 1 - digit) / 10) return false;
        value = value * 10 + digit;
    }
    text->len = (size_t)(end - at);
    text->at = at;
    *out = value;
    return at > first;
}

bool
mt_text_field(mt_text text, const char *key, uint64_t *out)
{
    mt_text line;

    while (mt_text_line(&text, &line)) {
        if (!mt_text_starts(line, key)) continue;
        line.at += strlen(key);
        line.len -= strlen(key);
        return mt_text_number(&line, out);
    }
    return false;
}

uint64_t
mt_text_kib(mt_text text, const char *key)
{
    uint64_t kib;

    if (!mt_text_field(text, key, &kib) || kib > (MT_UNLIMITED - 1) / 1024) return MT_UNKNOWN;
    return kib * 1024;
}

bool
mt_statm_parse(mt_text text, uint64_t *resident, uint64_t *shared)
{
    uint64_t numbers[7], page = (uint64_t)sysconf(_SC_PAGESIZE);

    for (size_t i = 0; i < 7; i++) {
        if (!mt_text_number(&text, &numbers[i])) return false;
    }
    *resident = numbers[1] * page;
    *shared = numbers[2] * page;
    return mt_text_is(text, "\n") && numbers[4] == 0 && numbers[6] == 0 &&
           numbers[2] <= numbers[1] && numbers[1] <= (MT_UNLIMITED - 1) / page;
}

/* "12 (a name) with) S 1 12 ...": the name may hold anything, so the last bracket ends it. The state
 * is the third field. */
bool
mt_stat_field(mt_text text, int field, uint64_t *out)
{
    mt_text word = {text.at, 0};
    size_t name = text.len;

    while (name > 0 && text.at[name - 1] != ')')
        name--;
    if (name == 0 || !mt_text_starts((mt_text){text.at + name, text.len - name}, " ")) return false;
    text = (mt_text){text.at + name + 1, text.len - name - 1};
    for (int at = 3; at <= field; at++) {
        if (!mt_text_word(&text, ' ', &word)) return false;
    }
    return mt_text_number(&word, out) && (word.len == 0 || mt_text_is(word, "\n"));
}

/* Takes a hexadecimal number off the text, and the one character that must follow it. */
static bool
hexadecimal(mt_text *text, char end, uint64_t *out)
{
    static const char digits[] = "0123456789abcdef";
    const char *at = text->at, *stop = at + text->len, *digit;

    for (*out = 0; at < stop && *at != end; at++) {
        if (*at == 0 || (digit = strchr(digits, *at)) == NULL || *out >> 60 != 0) return false;
        *out = *out << 4 | (uint64_t)(digit - digits);
    }
    if (at == stop || at == text->at) return false;
    text->len = (size_t)(stop - at) - 1;
    text->at = at + 1;
    return true;
}

/* "7f5c6d23c000-7f5c6d29e000 rw-s 00000000 00:1b 22891   /dev/shm/a (deleted)". */
bool
mt_mapping_parse(mt_text line, mt_mapping *out)
{
    static const char deleted[] = " (deleted)";
    size_t tail = sizeof deleted - 1;
    uint64_t high, low;
    mt_text rights;

    if (!hexadecimal(&line, '-', &out->start) || !hexadecimal(&line, ' ', &out->end)) return false;
    if (!mt_text_word(&line, ' ', &rights) || rights.len != 4) return false;
    if (!hexadecimal(&line, ' ', &out->offset)) return false;
    if (!hexadecimal(&line, ':', &high) || !hexadecimal(&line, ' ', &low)) return false;
    if (high > UINT32_MAX || low > UINT32_MAX || !mt_text_number(&line, &out->inode)) return false;
    out->device = makedev((unsigned)high, (unsigned)low);
    out->deleted = line.len >= tail && memcmp(line.at + line.len - tail, deleted, tail) == 0;
    return out->start < out->end && out->offset <= MT_UNLIMITED - 1 - (out->end - out->start);
}

/* The kernel always prints two decimals: "0.25" is 25. */
bool
mt_pressure_parse(mt_text text, uint64_t *avg10)
{
    uint64_t whole, part;
    mt_text line, word;

    if (!mt_text_line(&text, &line) || !mt_text_starts(line, "some ")) return false;
    while (mt_text_word(&line, ' ', &word)) {
        if (!mt_text_starts(word, "avg10=")) continue;
        word = (mt_text){word.at + 6, word.len - 6};
        if (!mt_text_number(&word, &whole) || whole > 1000000) return false;
        if (word.len < 3 || word.at[0] != '.' || word.at[1] == ' ') return false;
        word = (mt_text){word.at + 1, word.len - 1};
        if (!mt_text_number(&word, &part) || part > 99) return false;
        *avg10 = whole * 100 + part;
        return true;
    }
    return false;
}

/* v1 says "no limit" as the largest multiple of a page that a signed number holds. */
bool
mt_limit_parse(mt_text text, uint64_t *out)
{
    mt_text line;

    if (!mt_text_line(&text, &line)) return false;
    if (mt_text_is(line, "max")) {
        *out = MT_UNLIMITED;
        return true;
    }
    if (!mt_text_number(&line, out) || line.len != 0) return false;
    if (*out >= (uint64_t)1 << 62) *out = MT_UNLIMITED;
    return true;
}

/* "4:memory:/a" is number, controllers, path; the path may hold colons. */
bool
mt_cgroup_path(mt_text text, const char *controller, mt_text *path)
{
    mt_text line, number, controllers;
    bool found = false;

    while (mt_text_line(&text, &line)) {
        if (!mt_text_word(&line, ':', &number) || line.len == 0) continue;
        if (memchr(line.at, ':', line.len) == NULL) continue;
        mt_text_word(&line, ':', &controllers);
        if (*controller == 0 ? controllers.len != 0 : !is_listed(controllers, controller)) continue;
        *path = line;
        found = true;
    }
    return found;
}

/* "36 31 0:29 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory": the fields
 * up to the lone dash vary in number. */
bool
mt_cgroup_mount_parse(mt_text line, mt_cgroup_mount *out)
{
    mt_text word, kind, source;
    int field = 0;

    *out = (mt_cgroup_mount){.memory = false};
    for (; mt_text_word(&line, ' ', &word); field++) {
        if (field == 3) out->top = word;
        if (field == 4) out->point = word;
        if (field > 4 && mt_text_is(word, "-")) break;
    }
    if (field < 5 || !mt_text_word(&line, ' ', &kind) || out->point.len == 0) return false;
    out->v2 = mt_text_is(kind, "cgroup2");
    if (!out->v2 && !mt_text_is(kind, "cgroup")) return false;
    if (!mt_text_word(&line, ' ', &source)) return out->v2;
    out->memory = !out->v2 && is_listed(line, "memory");
    return true;
}

static bool
is_octal(const char *at, size_t len)
{
    return len >= 4 && at[0] == '\\' && at[1] >= '0' && at[1] <= '3' && at[2] >= '0' &&
           at[2] <= '7' && at[3] >= '0' && at[3] <= '7';
}

bool
mt_text_unescape(mt_text text, char *out, size_t room)
{
    size_t n = 0;

    for (size_t i = 0; i < text.len; i++, n++) {
        const char *at = text.at + i;
        char byte = *at;

        if (is_octal(at, text.len - i)) {
            byte = (char)((at[1] - '0') * 64 + (at[2] - '0') * 8 + (at[3] - '0'));
            i += 3;
        }
        if (byte == 0 || n + 1 >= room) return false;
        out[n] = byte;
    }
    if (room == 0) return false;
    out[n] = 0;
    return true;
}
