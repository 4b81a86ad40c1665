// A device for tests. The host cannot read its memory, and its streams run their work later, in threads.
//
// Two devices share one address range that is not readable. The threads of the streams access the same memory through
// a second, readable range. Operators that are not below run on the CPU, on copies that wait for the stream.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <bit>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <thread>

namespace {
using at::Tensor;
using c10::Device, c10::DeviceIndex, c10::Stream;
constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex DEVICES = 2;
constexpr size_t ARENA = size_t{1} << 34, PAGE = 4096;

// -- streams: a thread each, which begins each task a little later

struct Latch {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_open = false;
  void open() {
    std::lock_guard lock(mutex);
    is_open = true;
    changed.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return is_open; });
  }
};
using LatchPtr = std::shared_ptr<Latch>;

struct Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  void add(std::function<void()> task) {
    std::lock_guard lock(mutex);
    tasks.push_back(std::move(task));
    changed.notify_one();
  }
  [[noreturn]] void run() {
    for (;;) {
      std::unique_lock lock(mutex);
      changed.wait(lock, [this] { return !tasks.empty(); });
      auto task = std::move(tasks.front());
      tasks.pop_front();
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      task();
    }
  }
  LatchPtr mark() {
    auto latch = std::make_shared<Latch>();
    add([latch] { latch->open(); });
    return latch;
  }
};

std::mutex queues_mutex;
auto& queues = *new std::map<std::pair<DeviceIndex, c10::StreamId>, Queue*>;
thread_local c10::StreamId current_stream[DEVICES] = {};
thread_local DeviceIndex current_device = 0;

DeviceIndex exchange_device(DeviceIndex index) { return std::exchange(current_device, index < 0 ? current_device : index); }

Queue& queue_of(DeviceIndex device, c10::StreamId id) {
  std::lock_guard lock(queues_mutex);
  auto& queue = queues[{device, id}];
  if (!queue) {
    queue = new Queue;
    std::thread([queue] { queue->run(); }).detach();
  }
  return *queue;
}
Queue& current_queue(Device device) {
  DeviceIndex index = device.has_index() ? device.index() : current_device;
  return queue_of(index, current_stream[index]);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Device at(DeviceIndex index) const { return Device(TYPE, index < 0 ? current_device : index); }
  c10::DeviceType type() const override { return TYPE; }
  Device exchangeDevice(Device device) const override { return at(exchange_device(device.index())); }
  Device getDevice() const override { return at(current_device); }
  void setDevice(Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { exchange_device(device.index()); }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  Stream stream(DeviceIndex index, c10::StreamId id) const { return Stream(Stream::UNSAFE, at(index), id); }
  Stream getStream(Device d) const override { return stream(d.index(), current_stream[at(d.index()).index()]); }
  Stream getDefaultStream(Device d) const override { return stream(d.index(), 0); }
  Stream getNewStream(Device d, int) const override {
    static std::atomic<c10::StreamId> last = 0;
    return stream(d.index(), ++last);
  }
  Stream exchangeStream(Stream s) const override {
    return stream(s.device_index(), std::exchange(current_stream[s.device_index()], s.id()));
  }
  void record(void** event, const Stream& s, DeviceIndex, c10::EventFlag) const override {
    destroyEvent(*event, 0);
    *event = new LatchPtr(queue_of(s.device_index(), s.id()).mark());
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<LatchPtr*>(event); }
  void block(void* event, const Stream& s) const override {
    if (event) queue_of(s.device_index(), s.id()).add([latch = *static_cast<LatchPtr*>(event)] { latch->wait(); });
  }
  void synchronizeEvent(void* event) const override {
    if (event) (*static_cast<LatchPtr*>(event))->wait();
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    std::lock_guard lock((*static_cast<LatchPtr*>(event))->mutex);
    return (*static_cast<LatchPtr*>(event))->is_open;
  }
  void synchronizeStream(const Stream& s) const override { queue_of(s.device_index(), s.id()).mark()->wait(); }
  void synchronizeDevice(DeviceIndex index) const override {
    std::vector<LatchPtr> latches;
    {
      std::lock_guard lock(queues_mutex);
      for (auto& [key, queue] : queues)
        if (key.first == index) latches.push_back(queue->mark());
    }
    for (auto& latch : latches) latch->wait();
  }
};

// -- memory

struct DeviceMemory final : c10::Allocator {
  static inline char* base = nullptr;
  static inline std::mutex mutex;
  static inline size_t used = 0;
  static inline std::map<char*, size_t> sizes;
  static inline std::multimap<size_t, char*> freed;
  c10::DataPtr allocate(size_t nbytes) override {
    Device device(TYPE, current_device);
    if (!nbytes) return {nullptr, nullptr, &release, device};
    size_t size = (nbytes + PAGE - 1) / PAGE * PAGE;
    std::lock_guard lock(mutex);
    if (!base) {
      int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
      base = static_cast<char*>(mmap(nullptr, 2 * ARENA, PROT_NONE, flags, -1, 0));
      mprotect(base + ARENA, ARENA, PROT_READ | PROT_WRITE);
    }
    char* address = base + used;
    if (auto found = freed.find(size); found != freed.end()) {
      address = found->second;
      freed.erase(found);
    } else {
      used += size;
    }
    sizes[address] = size;
    return {address, address, &release, device};
  }
  static void release(void* address) {
    if (!address) return;
    std::lock_guard lock(mutex);
    auto found = sizes.find(static_cast<char*>(address));
    freed.emplace(found->second, found->first);
    sizes.erase(found);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "not supported"); }
} device_memory;

struct PinnedMemory final : c10::Allocator {
  static inline std::mutex mutex;
  static inline std::map<const char*, size_t> sizes;
  static inline int64_t left = int64_t{1} << 40, most = 0, held = 0;
  c10::DataPtr allocate(size_t nbytes) override {
    nbytes = std::bit_ceil(nbytes);  // as torch for CUDA
    std::lock_guard lock(mutex);
    TORCH_CHECK(held + int64_t(nbytes) <= left, "out of pinned memory");
    char* address = static_cast<char*>(malloc(nbytes));
    sizes[address] = nbytes;
    most = std::max(most, held += nbytes);
    return {address, address, &release, c10::kCPU};
  }
  static void release(void* address) {
    std::lock_guard lock(mutex);
    auto found = sizes.find(static_cast<char*>(address));
    held -= found->second;
    sizes.erase(found);
    free(address);
  }
  static bool holds(const void* address) {
    std::lock_guard lock(mutex);
    auto after = sizes.upper_bound(static_cast<const char*>(address));
    return after != sizes.begin() && static_cast<const char*>(address) <= std::prev(after)->first + std::prev(after)->second;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "not supported"); }
} pinned_memory;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex index) const override { exchange_device(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return exchange_device(index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchange_device(index); }
  bool isPinnedPtr(const void* address) const override { return PinnedMemory::holds(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    TORCH_CHECK(!nbytes || !storage.nbytes(), "only empty storages can grow");
    storage.set_data_ptr_noswap(device_memory.allocate(nbytes));
    storage.set_nbytes(nbytes);
  }
};

// -- operators

constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);
struct OnDevice {
  DeviceIndex before = current_device;
  explicit OnDevice(std::optional<Device> device) {
    if (device && device->has_index()) current_device = device->index();
  }
  ~OnDevice() { current_device = before; }
};

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice guard(device);
  return at::detail::empty_generic(size, &device_memory, KEYS, dtype.value_or(at::kFloat), format);
}
Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  OnDevice guard(device);
  return at::detail::empty_strided_generic(size, stride, &device_memory, KEYS, dtype.value_or(at::kFloat));
}

// A CPU tensor on the memory of a tensor, for the threads of the streams.
Tensor accessible(const Tensor& tensor) {
  char* address = static_cast<char*>(const_cast<void*>(tensor.const_data_ptr()));
  if (!tensor.is_cpu() && address) address += ARENA;
  Tensor found = at::from_blob(address, tensor.sizes(), tensor.strides(), [keep = tensor.storage()](void*) {},
                               tensor.options().device(at::kCPU).requires_grad(false));
  found._set_conj(tensor.is_conj());
  found._set_neg(tensor.is_neg());
  return found;
}
void enqueue(Queue& queue, std::function<void()> work) {
  queue.add([work = std::move(work)] {
    at::NoGradGuard no_grad;
    work();
  });
}
Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  Queue& queue = current_queue(target.is_cpu() ? source.device() : target.device());
  enqueue(queue, [to = accessible(target), from = accessible(source)] { to.copy_(from); });
  if (!non_blocking && (target.is_cpu() || source.is_cpu())) queue.mark()->wait();
  return target;
}
Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (source.sizes() != target.sizes()) {
    auto dtype = target.scalar_type();
    Tensor resized = empty_strided(source.sizes(), source.strides(), dtype, at::kStrided, target.device(), false);
    target.unsafeGetTensorImpl()->set_storage_keep_dtype(resized.storage());
    target.unsafeGetTensorImpl()->set_sizes_and_strides(source.sizes(), source.strides());
  }
  return copy_from(source, target, /*non_blocking=*/true);
}
Tensor& fill(Tensor& target, const at::Scalar& value) {
  enqueue(current_queue(target.device()), [to = accessible(target), value] { to.fill_(value); });
  return target;
}
Tensor& zero(Tensor& target) { return fill(target, 0); }

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

// -- control by the tests

std::mutex holds_mutex;
auto& holds = *new std::vector<LatchPtr>;

void hold() {
  auto latch = std::make_shared<Latch>();
  {
    std::lock_guard lock(holds_mutex);
    holds.push_back(latch);
  }
  current_queue(Device(TYPE, current_device)).add([latch] { latch->wait(); });
}
void release() {
  std::lock_guard lock(holds_mutex);
  for (auto& latch : holds) latch->open();
  holds.clear();
}
void limit_pinned(int64_t nbytes) {
  std::lock_guard lock(PinnedMemory::mutex);
  PinnedMemory::left = nbytes;
  PinnedMemory::most = PinnedMemory::held;
}
int64_t most_pinned() {
  std::lock_guard lock(PinnedMemory::mutex);
  return PinnedMemory::most;
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

TORCH_LIBRARY(delayed, library) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  library.def("hold() -> ()", &hold);
  library.def("release() -> ()", &release);
  library.def("limit_pinned(int nbytes) -> ()", &limit_pinned);
  library.def("most_pinned() -> int", &most_pinned);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(&at::native::set_));
  library.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("fill_.Scalar", &fill);
  library.impl("zero_", &zero);
}
TORCH_LIBRARY_IMPL(aten, Conjugate, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
} // namespace
