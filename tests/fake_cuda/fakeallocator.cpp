// fakeallocator.cpp -- a CUDA allocator for torch's CPU build, which hands out nothing and counts
// what the test says: so that the shim's way to a real one can be walked without a GPU.
#include <c10/core/CachingDeviceAllocator.h>

namespace
{

struct Fake final : c10::DeviceAllocator {
    bool begun = false;
    int64_t bytes[8][4] = {};

    bool initialized() override { return begun; }

    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override
    {
        TORCH_CHECK(begun && device >= 0 && device < 2, "no such device");
        c10::CachingDeviceAllocator::DeviceStats stats;
        stats.allocated_bytes[0].current = bytes[device][0];
        stats.allocated_bytes[0].peak = bytes[device][3];
        stats.reserved_bytes[0].current = bytes[device][1];
        stats.inactive_split_bytes[0].current = bytes[device][2];
        return stats;
    }

    c10::DataPtr allocate(size_t) override { return {}; }

    void copy_data(void *, const void *, size_t) const override {}

    void emptyCache(c10::MempoolId_t) override {}

    void recordStream(const c10::DataPtr &, c10::Stream) override {}

    void resetAccumulatedStats(c10::DeviceIndex) override {}

    void resetPeakStats(c10::DeviceIndex) override {}
};

Fake fake;

} // namespace

extern "C" void
fake_allocator_register()
{
    c10::SetAllocator(c10::kCUDA, &fake, 255);
}

extern "C" void
fake_allocator_begin()
{
    fake.begun = true;
}

extern "C" void
fake_allocator_set(int device, int64_t allocated, int64_t reserved, int64_t split, int64_t peak)
{
    fake.bytes[device][0] = allocated;
    fake.bytes[device][1] = reserved;
    fake.bytes[device][2] = split;
    fake.bytes[device][3] = peak;
}
