#include "base/status.h"

mt_status
mt_fail(mt_error *err, mt_status st, const char *call, int native)
{
    if (err != NULL) *err = (mt_error){.status = st, .call = call, .native = native};
    return st;
}

mt_status
mt_fail_limit(mt_error *err, size_t asked, size_t used, size_t limit)
{
    if (err != NULL)
        *err = (mt_error){.status = MT_ELIMIT, .asked = asked, .used = used, .limit = limit};
    return MT_ELIMIT;
}

mt_status
mt_fail_shape(mt_error *err, mt_shape shape, size_t asked, size_t limit)
{
    if (err != NULL)
        *err = (mt_error){.status = MT_ESHAPE, .shape = shape, .asked = asked, .limit = limit};
    return MT_ESHAPE;
}

mt_status
mt_fail_format(mt_error *err, const char *detail)
{
    if (err != NULL) *err = (mt_error){.status = MT_EFORMAT, .detail = detail};
    return MT_EFORMAT;
}

const char *
mt_status_name(mt_status st)
{
    switch (st) {
    case MT_OK:
        return "MT_OK";
    case MT_ENOMEM:
        return "MT_ENOMEM";
    case MT_EOVERFLOW:
        return "MT_EOVERFLOW";
    case MT_ELIMIT:
        return "MT_ELIMIT";
    case MT_EDEVICE:
        return "MT_EDEVICE";
    case MT_EFORMAT:
        return "MT_EFORMAT";
    case MT_ESHAPE:
        return "MT_ESHAPE";
    case MT_EAGAIN:
        return "MT_EAGAIN";
    case MT_EFILE:
        return "MT_EFILE";
    }
    return "unknown status";
}
