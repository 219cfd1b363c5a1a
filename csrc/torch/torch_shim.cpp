// torch_shim.cpp -- memtools._torch: the only file that sees ATen.
#include "torch_shim.h"

#include "../third_party/dlpack/dlpack.h"

#include <ATen/Parallel.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

namespace
{

int
in_backward() noexcept
{
    return torch::autograd::get_current_graph_task_id() != -1;
}

/* DLPack's type code of the common gate dtypes, 0 for others. */
unsigned char
type_code(c10::ScalarType dtype) noexcept
{
    switch (dtype) {
    case c10::ScalarType::Double:
    case c10::ScalarType::Float:
    case c10::ScalarType::Half:
        return kDLFloat;
    case c10::ScalarType::BFloat16:
        return kDLBfloat;
    default:
        return 0;
    }
}

/* Lazily negated or conjugated, wrapped by functorch or by a Python subclass: the memory, where
 * there is any, is not the value. */
bool
is_plain(const at::Tensor &t)
{
    constexpr c10::DispatchKeySet lazy(
        {c10::DispatchKey::Negative, c10::DispatchKey::Conjugate, c10::DispatchKey::ZeroTensor,
         c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
         c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize});

    return t.layout() == c10::kStrided && (t.is_cpu() || t.is_cuda()) &&
           !t.key_set().has_any(lazy) && t.has_storage();
}

int
view(void *tensor, mt_torch_view *out) noexcept
{
    try {
        const at::Tensor &t = THPVariable_Unpack(static_cast<PyObject *>(tensor));
        unsigned char type = type_code(t.scalar_type());
        if (type == 0 || t.dim() != 2 || !is_plain(t)) return 0;
        const void *data = t.const_data_ptr();
        if (data == nullptr && t.numel() > 0) return 0;
        *out = {data,
                {t.size(0), t.size(1)},
                {t.stride(0), t.stride(1)},
                type,
                static_cast<unsigned char>(8 * t.element_size()),
                t.is_cuda(),
                t.is_cuda() ? t.get_device() : 0};
        return 1;
    } catch (...) {
        return 0;
    }
}

int
view4(void *tensor, mt_torch_view4 *out) noexcept
{
    try {
        const at::Tensor &t = THPVariable_Unpack(static_cast<PyObject *>(tensor));
        if (t.dim() != 4 || !is_plain(t) || t.is_quantized()) return 0;
        const void *data = t.const_data_ptr();
        if (data == nullptr && t.numel() > 0) return 0;
        out->data = data;
        std::copy_n(t.sizes().data(), 4, out->shape);
        std::copy_n(t.strides().data(), 4, out->strides);
        out->dtype = static_cast<int>(t.scalar_type());
        out->cuda = t.is_cuda();
        out->device = t.is_cuda() ? t.get_device() : 0;
        out->keeps_graph = at::GradMode::is_enabled() && t.requires_grad();
        return 1;
    } catch (...) {
        return 0;
    }
}

int
dtype_number(void *dtype) noexcept
{
    PyObject *object = static_cast<PyObject *>(dtype);

    if (!THPDtype_Check(object)) return -1;
    return static_cast<int>(reinterpret_cast<THPDtype *>(object)->scalar_type);
}

/* A storage with the version counter of all tensors over it. */
struct VersionedStorage : c10::StorageImpl {
    using c10::StorageImpl::StorageImpl;
    c10::VariableVersion version{0};
};

void *
storage_new(void *data, size_t bytes, int cuda_device, void (*done)(void *), void *ctx) noexcept
{
    try {
        c10::Device device =
            cuda_device < 0 ? c10::Device(c10::kCPU)
                            : c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(cuda_device));
        // The deleter comes last: what throws before it leaves ctx to the caller.
        auto storage = c10::make_intrusive<VersionedStorage>(
            c10::StorageImpl::use_byte_size_t(), c10::SymInt(static_cast<int64_t>(bytes)),
            c10::DataPtr(data, device), nullptr, false);
        storage->set_data_ptr_noswap(c10::DataPtr(data, ctx, done, device));
        return static_cast<c10::StorageImpl *>(storage.release());
    } catch (...) {
        return nullptr;
    }
}

void
storage_drop(void *storage) noexcept
{
    c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl *>(storage));
}

size_t
storage_uses(const void *storage) noexcept
{
    return c10::raw::intrusive_ptr::use_count(
        const_cast<c10::StorageImpl *>(static_cast<const c10::StorageImpl *>(storage)));
}

/* pre: made by storage_new */
c10::VariableVersion &
version_of(c10::StorageImpl *storage)
{
    return static_cast<VersionedStorage *>(storage)->version;
}

void
storage_written(void *storage) noexcept
{
    version_of(static_cast<c10::StorageImpl *>(storage)).bump();
}

at::Tensor
tensor_over(const c10::Storage &storage, const mt_torch_shape *shape, int64_t first)
{
    const c10::InferenceMode normal(false);
    c10::DispatchKey key =
        storage.device().is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
    auto type = c10::scalarTypeToTypeMeta(static_cast<c10::ScalarType>(shape->dtype));
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage),
                                                           c10::DispatchKeySet(key), type);
    size_t dims = static_cast<size_t>(shape->dims);

    auto *impl = tensor.unsafeGetTensorImpl();
    impl->set_sizes_and_strides({shape->shape, dims}, {shape->strides, dims}, first);
    impl->set_version_counter(version_of(storage.unsafeGetStorageImpl()));
    return tensor;
}

int
tensors(void *storage, const mt_torch_shape *shape, const int64_t first[2], void *out[2]) noexcept
{
    out[0] = nullptr;
    try {
        // Making objects may run finalizers, and they may drop the caller's reference.
        auto *impl = static_cast<c10::StorageImpl *>(storage);
        c10::Storage kept(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(impl));
        out[0] = THPVariable_Wrap(tensor_over(kept, shape, first[0]));
        out[1] = out[0] ? THPVariable_Wrap(tensor_over(kept, shape, first[1])) : nullptr;
        if (out[1] != nullptr) return 0;
    } catch (const std::exception &error) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_MemoryError, error.what());
    }
    Py_XDECREF(static_cast<PyObject *>(out[0]));
    return -1;
}

/* A wrapper made in Python answers for its shape and device by Python code, a nested tensor has no
 * one shape, a traced one has symbols for numbers. */
void
place_facts(const at::TensorImpl *impl, mt_torch_facts *out)
{
    if (impl->is_python_dispatch()) return;
    c10::Device device = impl->device();
    out->device = static_cast<int64_t>(device.type()) << 16 | static_cast<uint16_t>(device.index());
    if (impl->is_nested() || impl->has_symbolic_sizes_strides()) return;
    c10::IntArrayRef sizes = impl->sizes();
    out->shape = sizes.data();
    out->dims = static_cast<int>(sizes.size());
    out->bytes = impl->dtype().itemsize();
    for (int64_t size : sizes) {
        out->bytes *= static_cast<size_t>(size);
    }
}

/* The gradient without Tensor::grad()'s warning about tensors that are not leaves. */
const at::Tensor &
subject(void *object, int of_grad)
{
    const at::Tensor &t = THPVariable_Unpack(static_cast<PyObject *>(object));

    return of_grad && t.defined() ? t.unsafeGetTensorImpl()->grad() : t;
}

/* Zeros where there is no memory, or symbols stand for its size. */
void
storage_facts(const at::TensorImpl *impl, const void **storage, size_t *size)
{
    *storage = nullptr;
    *size = 0;
    if (!impl->unsafe_storage()) return;
    const c10::StorageImpl *memory = impl->unsafe_storage().unsafeGetStorageImpl();
    c10::SymInt bytes = memory->sym_nbytes();
    if (bytes.is_heap_allocated()) return;
    *storage = memory->data_ptr().get();
    *size = static_cast<size_t>(bytes.as_int_unchecked());
}

int
facts(void *tensor, mt_torch_facts *out) noexcept
{
    try {
        const at::Tensor &t = THPVariable_Unpack(static_cast<PyObject *>(tensor));
        if (!t.defined()) return 0;
        const at::TensorImpl *impl = t.unsafeGetTensorImpl();
        *out = {nullptr, -1, torch::getTHPDtype(t.scalar_type()), -1, nullptr, 0, 0};
        place_facts(impl, out);
        storage_facts(impl, &out->storage, &out->storage_bytes);
        return 1;
    } catch (...) {
        return 0;
    }
}

/* The grad_fn as it stands. Tensor::grad_fn() would make a new one for a view whose base was written
 * to, and grad_accumulator() one for a leaf. */
torch::autograd::Node *
node_of(const at::Tensor &t)
{
    return t.defined() ? torch::autograd::impl::grad_fn_unsafe(t) : nullptr;
}

int
links(void *tensor, mt_torch_links *out) noexcept
{
    *out = {};
    try {
        const at::Tensor &t = subject(tensor, false);
        if (!t.defined()) return 0;
        const torch::autograd::Node *node = node_of(t);
        out->tensor = t.unsafeGetTensorImpl();
        out->node = node;
        out->number = node != nullptr ? node->sequence_nr() : 0;
        const at::Tensor &grad = subject(tensor, true);
        if (!grad.defined()) return 1;
        out->grad = grad.unsafeGetTensorImpl();
        out->grad_object = grad.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
        storage_facts(grad.unsafeGetTensorImpl(), &out->storage, &out->storage_bytes);
        const torch::autograd::Node *of_grad = node_of(grad);
        out->grad_node = of_grad;
        out->grad_number = of_grad != nullptr ? of_grad->sequence_nr() : 0;
        return 1;
    } catch (...) {
        return 0;
    }
}

/* Depth first. What waits is a vector of borrowed addresses: the root's reference keeps all of them
 * alive, as a node never lets go of its inputs while it lives. */
int
walk_from(torch::autograd::Node *root, mt_torch_visit visit, void *ctx)
{
    std::vector<const torch::autograd::Node *> waiting{root};

    while (!waiting.empty()) {
        const torch::autograd::Node *node = waiting.back();
        waiting.pop_back();
        int next = visit(ctx, node, node->sequence_nr());
        if (next == MT_TORCH_STOP) return next;
        if (next == MT_TORCH_PASS) continue;
        for (const torch::autograd::Edge &edge : node->next_edges())
            if (edge.function) waiting.push_back(edge.function.get());
    }
    return 0;
}

int
graph_walk(void *tensor, int of_grad, mt_torch_visit visit, void *ctx) noexcept
{
    try {
        torch::autograd::Node *root = node_of(subject(tensor, of_grad));
        if (root == nullptr) return 0;
        const auto kept = root->getptr();
        return walk_from(root, visit, ctx);
    } catch (...) {
        return MT_TORCH_STOP;
    }
}

uint64_t
next_number() noexcept
{
    return at::sequence_number::peek();
}

/* The allocator is the one that libc10_cuda registers where it is loaded, or none: nothing of CUDA
 * is linked. Before torch has begun to use CUDA it is there, but not initialised. */
int
memory(int device, mt_torch_memory *out) noexcept
{
    try {
        auto *allocator = dynamic_cast<c10::DeviceAllocator *>(c10::GetAllocator(c10::kCUDA));
        if (allocator == nullptr || !allocator->initialized()) return 0;
        const auto stats = allocator->getDeviceStats(static_cast<c10::DeviceIndex>(device));
        constexpr size_t all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
        *out = {static_cast<uint64_t>(stats.allocated_bytes[all].current),
                static_cast<uint64_t>(stats.allocated_bytes[all].peak),
                static_cast<uint64_t>(stats.reserved_bytes[all].current),
                static_cast<uint64_t>(stats.inactive_split_bytes[all].current)};
        return 1;
    } catch (...) {
        return 0;
    }
}

bool
is_flat(const at::Tensor &t, int writing)
{
    return is_plain(t) && t.is_cpu() && type_code(t.scalar_type()) != 0 && !t.is_nested() &&
           !t.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
           t.is_non_overlapping_and_dense() && !(writing && t.is_inference());
}

void
flat_one(const at::Tensor &t, int writing, mt_torch_flat *out)
{
    if (!t.defined()) return;
    out->is = MT_TORCH_OTHER;
    if (!is_flat(t, writing)) return;
    void *data = writing ? t.mutable_data_ptr() : const_cast<void *>(t.const_data_ptr());
    if (data == nullptr && t.numel() > 0) return;
    out->type = type_code(t.scalar_type());
    out->bits = static_cast<unsigned char>(8 * t.element_size());
    out->data = data;
    out->count = static_cast<size_t>(t.numel());
    out->tensor = c10::intrusive_ptr<c10::TensorImpl>(t.getIntrusivePtr()).release();
    c10::StorageImpl *storage = t.storage().unsafeGetStorageImpl();
    out->storage = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage).release();
    out->is = MT_TORCH_FLAT;
}

void
flat(void *const *tensors, size_t n, int of_grad, int writing, mt_torch_flat *out) noexcept
{
    for (size_t i = 0; i < n; i++) {
        out[i] = {};
        try {
            flat_one(subject(tensors[i], of_grad), writing, &out[i]);
        } catch (...) {
            out[i].is = MT_TORCH_OTHER;
        }
    }
}

void
flat_drop(mt_torch_flat *flat, size_t n) noexcept
{
    for (size_t i = 0; i < n; i++) {
        if (flat[i].is != MT_TORCH_FLAT) continue;
        c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl *>(flat[i].storage));
        c10::raw::intrusive_ptr::decref(static_cast<c10::TensorImpl *>(flat[i].tensor));
        flat[i].is = MT_TORCH_NONE;
    }
}

void
flat_written(const mt_torch_flat *flat, size_t n) noexcept
{
    for (size_t i = 0; i < n; i++)
        if (flat[i].is == MT_TORCH_FLAT)
            static_cast<c10::TensorImpl *>(flat[i].tensor)->bump_version();
}

/* A tensor made in inference mode has no version. */
uint32_t
version_of(const c10::TensorImpl *grad) noexcept
{
    const c10::VariableVersion &version = grad->version_counter();

    return version.enabled() ? version.current_version() : 0;
}

void
see_one(const at::Tensor &grad, mt_torch_seen *seen)
{
    c10::TensorImpl *impl = grad.defined() ? grad.unsafeGetTensorImpl() : nullptr;

    if (impl != seen->grad) {
        using weak = c10::weak_intrusive_ptr<c10::TensorImpl>;
        if (seen->grad != nullptr) weak::reclaim(static_cast<c10::TensorImpl *>(seen->grad));
        seen->grad = impl != nullptr ? weak(grad.getIntrusivePtr()).release() : nullptr;
    }
    seen->version = impl != nullptr ? version_of(impl) : 0;
}

void
grads_see(void *const *tensors, size_t n, mt_torch_seen *seen) noexcept
{
    for (size_t i = 0; i < n; i++)
        see_one(subject(tensors[i], true), &seen[i]);
}

int
grads_changed(void *const *tensors, size_t n, const mt_torch_seen *seen) noexcept
{
    int most = MT_TORCH_SAME;

    for (size_t i = 0; i < n; i++) {
        const at::Tensor &grad = subject(tensors[i], true);
        const c10::TensorImpl *impl = grad.defined() ? grad.unsafeGetTensorImpl() : nullptr;
        int found = MT_TORCH_SAME;
        if (impl != seen[i].grad)
            found = impl != nullptr ? MT_TORCH_REPLACED : MT_TORCH_DROPPED;
        else if (impl != nullptr && version_of(impl) != seen[i].version)
            found = MT_TORCH_WRITTEN;
        most = std::max(most, found);
    }
    return most;
}

void
grads_forget(mt_torch_seen *seen, size_t n) noexcept
{
    for (size_t i = 0; i < n; i++)
        see_one(at::Tensor(), &seen[i]);
}

int
threads() noexcept
{
    return at::get_num_threads();
}

void
parallel(void *, int64_t n, void (*task)(void *, int64_t, int64_t), void *arg) noexcept
{
    at::parallel_for(0, n, 1, [=](int64_t begin, int64_t end) { task(arg, begin, end); });
}

/* --- the host allocator's reports --------------------------------------------------------------
 *
 * torch asks one object for all memory of the host, and lets it be replaced. ReportingAllocator hands
 * each request on to the one that was there, reports the block, and gives it a deleter of ours, which
 * reports the release and calls the deleter that was there:
 *
 *     torch ──allocate(n)──► ReportingAllocator ──► allocator before ──► block, deleter before
 *                                 └─► born(block, n)                  block, reporting_delete
 *     torch ──reporting_delete(block)──► died(block), deleter before(block)
 *
 * A profiler's own object for such reports (c10::ThreadLocalDebugInfo) is left to the profiler: there
 * is one for each thread, and torch refuses to start a profiler where it is taken. */
std::atomic<const mt_torch_listener *> listening{nullptr};
std::atomic<c10::DeleterFnPtr> delete_before{nullptr};

void
reporting_delete(void *block)
{
    const mt_torch_listener *listener = listening.load(std::memory_order_acquire);

    if (listener != nullptr) listener->died(listener->ctx, block);
    delete_before.load(std::memory_order_relaxed)(block);
}

struct ReportingAllocator final : c10::Allocator {
    c10::Allocator *before = nullptr;

    c10::DataPtr allocate(size_t n) override
    {
        c10::DataPtr block = before->allocate(n);
        const mt_torch_listener *listener = listening.load(std::memory_order_acquire);
        if (block.get() != nullptr && block.get() == block.get_context() &&
            block.compare_exchange_deleter(delete_before.load(std::memory_order_relaxed),
                                           reporting_delete) &&
            listener != nullptr)
            listener->born(listener->ctx, block.get(), n);
        return block;
    }

    bool is_simple_data_ptr(const c10::DataPtr &block) const override
    {
        return before->is_simple_data_ptr(block);
    }

    c10::DeleterFnPtr raw_deleter() const override { return reporting_delete; }

    void copy_data(void *to, const void *from, std::size_t n) const override
    {
        before->copy_data(to, from, n);
    }
};

/* A block that was allocated through it may point to it: it lives as long as the process. */
ReportingAllocator &
reporting_allocator()
{
    static auto *allocator = new ReportingAllocator;

    return *allocator;
}

/* torch ignores an allocator of a lower priority than any before, and does not say which that was. So
 * the lowest that takes is used: then other libraries can set theirs as they could without us. One
 * that is set while there is a listener takes our place, and no block is reported from then on. */
void
set_allocator(c10::Allocator *allocator)
{
    for (unsigned priority = 0; priority <= UINT8_MAX; priority++) {
        c10::SetAllocator(c10::kCPU, allocator, static_cast<uint8_t>(priority));
        if (c10::GetAllocator(c10::kCPU) == allocator) return;
    }
}

int
listen(const mt_torch_listener *listener) noexcept
{
    try {
        ReportingAllocator &ours = reporting_allocator();
        c10::Allocator *now = c10::GetAllocator(c10::kCPU);
        if (listener == nullptr) {
            if (now == &ours) set_allocator(ours.before);
            listening.store(nullptr, std::memory_order_release);
            return 1;
        }
        if (now != &ours) {
            c10::DeleterFnPtr deleter = now != nullptr ? now->raw_deleter() : nullptr;
            c10::DeleterFnPtr known = delete_before.load(std::memory_order_relaxed);
            // Blocks that live have the first one's deleter to be called, so another's cannot be.
            if (deleter == nullptr || (known != nullptr && known != deleter)) return 0;
            delete_before.store(deleter, std::memory_order_relaxed);
            ours.before = now;
        }
        listening.store(listener, std::memory_order_release);
        if (now != &ours) set_allocator(&ours);
        return 1;
    } catch (...) {
        return 0;
    }
}

/* --- what torch does -----------------------------------------------------------------------------
 *
 * torch calls every RecordFunction callback at the begin and the end of an operator, a node and a named
 * range. One callback of the process is ours while there is an observer. A thread takes the list of
 * callbacks when something begins, and calls the same ones at its end: so ours may be called after it
 * was removed, and each call asks who observes now. */
std::atomic<const mt_torch_observer *> observed_by{nullptr};
at::CallbackHandle observing = at::INVALID_CALLBACK_HANDLE; // under the GIL

thread_local const char thread_mark = 0; // its address identifies the thread

struct Begun final : at::ObserverContext {
    const void *thread = &thread_mark;
    const mt_torch_observer *observer = nullptr;
    mt_torch_begun what = {0, 0};
};

std::unique_ptr<at::ObserverContext>
something_begins(const at::RecordFunction &what)
{
    const mt_torch_observer *observer = observed_by.load(std::memory_order_acquire);
    int kind = MT_TORCH_OPERATOR;

    if (observer == nullptr) return nullptr;
    if (what.scope() == at::RecordScope::BACKWARD_FUNCTION) kind = MT_TORCH_NODE;
    if (what.scope() == at::RecordScope::USER_SCOPE) kind = MT_TORCH_RANGE;
    auto begun = std::make_unique<Begun>();
    begun->observer = observer;
    begun->what = observer->begun(observer->ctx, kind, what.name());
    return begun;
}

void
report_made(const Begun &begun, const at::Tensor &t)
{
    const mt_torch_observer *observer = begun.observer;
    const void *block;
    size_t bytes;
    mt_torch_facts shape = {nullptr, -1, nullptr, -1, nullptr, 0, 0};

    if (!t.defined() || !t.is_cpu() || !is_plain(t)) return;
    const at::TensorImpl *impl = t.unsafeGetTensorImpl();
    place_facts(impl, &shape);
    if (shape.dims < 0 || impl->storage_offset() != 0) return;
    storage_facts(impl, &block, &bytes);
    if (block == nullptr || bytes != shape.bytes) return;
    observer->made(observer->ctx, begun.what, block, bytes, static_cast<int>(t.scalar_type()),
                   shape.shape, shape.dims);
}

void
something_ends(const at::RecordFunction &what, at::ObserverContext *context)
{
    const auto *begun = static_cast<const Begun *>(context);

    if (begun == nullptr) return;
    if (observed_by.load(std::memory_order_relaxed) != nullptr) {
        for (const c10::IValue &value : what.outputs()) {
            if (value.isTensor()) report_made(*begun, value.toTensor());
            if (!value.isTensorList()) continue;
            for (const c10::IValue &item : value.toListRef())
                report_made(*begun, item.toTensor());
        }
    }
    if (begun->thread == &thread_mark) begun->observer->ended(begun->observer->ctx, begun->what);
}

int
observe(const mt_torch_observer *observer) noexcept
{
    try {
        observed_by.store(observer, std::memory_order_release);
        if (observer == nullptr && observing != at::INVALID_CALLBACK_HANDLE) {
            at::removeCallback(observing);
            observing = at::INVALID_CALLBACK_HANDLE;
        }
        if (observer != nullptr && observing == at::INVALID_CALLBACK_HANDLE)
            observing = at::addGlobalCallback(
                at::RecordFunctionCallback(something_begins, something_ends)
                    .needsOutputs(true)
                    .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION,
                             at::RecordScope::USER_SCOPE}));
        return 1;
    } catch (...) {
        return 0;
    }
}

const char *
dtype_name(int dtype) noexcept
{
    try {
        if (dtype < 0 || dtype >= static_cast<int>(c10::ScalarType::NumOptions)) return "";
        return torch::getTHPDtype(static_cast<c10::ScalarType>(dtype))->name;
    } catch (...) {
        return "";
    }
}

const mt_torch_ops ops = {MT_TORCH_OPS_VERSION,
                          in_backward,
                          view,
                          view4,
                          dtype_number,
                          storage_new,
                          storage_drop,
                          storage_uses,
                          tensors,
                          storage_written,
                          facts,
                          links,
                          graph_walk,
                          next_number,
                          memory,
                          flat,
                          flat_drop,
                          flat_written,
                          grads_see,
                          grads_changed,
                          grads_forget,
                          threads,
                          parallel,
                          listen,
                          observe,
                          dtype_name};

// Attribute "ops" holds the capsule. The table is constant, so nothing needs freeing.
int
exec(PyObject *module) noexcept
{
    PyObject *capsule = PyCapsule_New(const_cast<mt_torch_ops *>(&ops), MT_TORCH_CAPSULE, nullptr);

    if (capsule == nullptr) return -1;
    int failed = PyModule_AddObjectRef(module, "ops", capsule);
    Py_DECREF(capsule);
    return failed;
}

PyModuleDef_Slot slots[] = {{Py_mod_exec, reinterpret_cast<void *>(exec)}, {0, nullptr}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "memtools._torch", nullptr, 0, nullptr, slots, nullptr, nullptr, nullptr,
};

} // namespace

PyMODINIT_FUNC
PyInit__torch()
{
    return PyModuleDef_Init(&definition);
}
