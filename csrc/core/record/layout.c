#include "record/layout.h"

#include <assert.h>
#include <string.h>

#include "base/utf8.h"

_Static_assert(MT_EVENT_BODY * 8 + MT_RECORD_TEXT == MT_EVENT_WORDS * 8, "then the check");
_Static_assert((MT_EVENT_FORM - MT_EVENT_KIND) * 8 == MT_RECORD_KIND,
               "the kind is before the form");
_Static_assert(MT_RECORD_COMMAND_FROM + MT_RECORD_COMMAND == MT_RECORD_HEADER, "nothing behind it");

const char *
mt_record_size_fault(const mt_record_size *size)
{
    const char *fault = mt_series_fault(&size->series);

    if (fault != NULL) return fault;
    if (size->events < 1 || size->events > MT_RECORD_EVENTS_MAX)
        return "a number of events outside 1 to 65,536";
    if (size->phases < 1 || size->phases > MT_RECORD_PHASES_MAX)
        return "a number of phases outside 1 to 4,096";
    if (size->payloads % 8 != 0 || size->payloads > MT_RECORD_PAYLOADS_MAX)
        return "bytes for payloads that are not a multiple of 8 up to 16 MiB";
    return NULL;
}

mt_record_parts
mt_record_parts_of(const mt_record_size *size)
{
    mt_record_parts p = {.columns = MT_RECORD_HEADER};

    assert(mt_record_size_fault(size) == NULL);
    p.series = p.columns + size->series.columns * sizeof(mt_record_column);
    p.events = p.series + mt_series_bytes(&size->series);
    p.phases = p.events + size->events * 8 * MT_EVENT_STRIDE;
    p.payloads = p.phases + size->phases * 8 * MT_RECORD_PHASE_STRIDE;
    p.end = p.payloads + size->payloads;
    return p;
}

const char *
mt_record_columns_fault(const mt_record_column *columns, size_t n)
{
    for (size_t c = 0; c < n; c++) {
        size_t name = mt_utf8_field(columns[c].name, MT_RECORD_NAME);
        if (name == 0) return "a column without a name";
        if (name == MT_RECORD_NAME) return "a column's name of more than 31 bytes";
        if (mt_utf8_field(columns[c].unit, MT_RECORD_UNIT) == MT_RECORD_UNIT)
            return "a column's unit of more than 15 bytes";
        for (size_t before = 0; before < c; before++)
            if (strcmp(columns[before].name, columns[c].name) == 0)
                return "two columns of one name";
    }
    return NULL;
}

static uint32_t
crc_of(uint32_t crc, const unsigned char *at, size_t n)
{
    for (; n > 0; n--, at++) {
        crc ^= *at;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
    }
    return crc;
}

uint32_t
mt_record_crc(const void *record, size_t columns)
{
    const unsigned char *at = record;
    uint32_t crc = crc_of(0xFFFFFFFFu, at, (size_t)8 * MT_RECORD_AT_CRC);

    crc = crc_of(crc, at + MT_RECORD_COMMAND_FROM, MT_RECORD_COMMAND);
    return ~crc_of(crc, at + MT_RECORD_HEADER, columns * sizeof(mt_record_column));
}
