// A CUDA device without a GPU, for a torch without CUDA: device type and dispatch key are CUDA's,
// the memory is the host's, filled with NaN when it is handed out and when it is given back.
// What it keeps: one device an operator, generators by device, memory by device, no reading of
// device memory from the host. What it cannot show: numerics and speed of kernels. Of asynchrony it
// shows what has no order (streams.cpp).

#include "simulated.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <map>
#include <mutex>

namespace simulated {

using c10::Device;
using c10::DeviceIndex;

thread_local DeviceIndex current_device = 0;
std::function<void(const std::string&, int64_t)> on_sync;

void tell_sync(const std::string& what, int64_t bytes) {
  if (!on_sync) return;
  py::gil_scoped_acquire gil;
  on_sync(what, bytes);
}

std::mutex launches_lock;
std::map<std::string, int64_t> launches;

void count_launch(const std::string& name) {
  std::lock_guard<std::mutex> guard(launches_lock);
  launches[name]++;
}

namespace {

int num_devices() {
  static const int number = [] {
    const char* text = getenv("SIMCUDA_DEVICES");
    return text ? atoi(text) : 8;
  }();
  return number;
}

void check_index(int index) {
  TORCH_CHECK(index >= 0 && index < num_devices(), "CUDA error: invalid device ordinal");
}

// ---- memory ----------------------------------------------------------------------------------

struct Usage {
  int64_t bytes = 0, peak_bytes = 0, allocations = 0, blocks = 0;
};

std::mutex usage_lock;
std::array<Usage, kMostDevices> usage;

}  // namespace

void count(int device, int64_t bytes) {
  std::lock_guard<std::mutex> guard(usage_lock);
  auto& seen = usage[device];
  seen.bytes += bytes;
  seen.blocks += bytes > 0 ? 1 : bytes < 0 ? -1 : 0;
  seen.allocations += bytes > 0;
  seen.peak_bytes = std::max(seen.peak_bytes, seen.bytes);
}

int64_t rounded(int64_t bytes) { return (bytes + 511) / 512 * 512; }  // as CUDA's allocator does

void spoil(void* memory, int64_t bytes) { memset(memory, 0xFF, bytes); }  // NaN, -1, True

namespace {

struct Block {
  const void* address;
  void* memory;
  int64_t bytes;
  int device;
  c10::Storage owner;  // whose memory it is, where a kernel of the CPU has made it
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  count(block->device, -rounded(block->bytes));
  remove_block(block->address);
  if (block->memory) {
    spoil(block->memory, block->bytes);
    free(block->memory);
  }
  delete block;
}

c10::DataPtr counted(void* memory, int64_t bytes, int device, c10::Storage owner) {
  count(device, rounded(bytes));
  add_block(memory, bytes, current_stream(device));
  void* own = owner ? nullptr : memory;
  auto* block = new Block{memory, own, bytes, device, owner};
  return {memory, block, &free_block, Device(kDevice, device)};
}

int64_t whole_memory() {
  const char* text = getenv("SIMCUDA_MEMORY");
  return text ? atoll(text) : int64_t{80} << 30;
}

}  // namespace

void check_memory(int device, int64_t bytes) {
  const auto used = usage[device].bytes + kept_by_pools(device);
  TORCH_CHECK_WITH(
      OutOfMemoryError, used + rounded(bytes) <= whole_memory(),
      "CUDA out of memory. Tried to allocate ", bytes, " bytes. GPU ", device,
      " has a total capacity of ", whole_memory(), " bytes of which ", whole_memory() - used,
      " are free (simulated)");
  check_reuse(current_stream(device), bytes);
}

namespace {

struct SimulatedAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes) check_memory(current_device, bytes);
    if (bytes && in_pool()) return allocate_in_pool(bytes);
    void* memory = nullptr;
    if (bytes) {
      TORCH_CHECK(!posix_memalign(&memory, 512, rounded(bytes)), "the host is out of memory");
      spoil(memory, bytes);
    }
    return counted(memory, bytes, current_device, {});
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    memcpy(to, from, bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}  // as an operator: kernels.cpp
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex index) override {
    const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    c10::CachingDeviceAllocator::DeviceStats stats;
    std::lock_guard<std::mutex> guard(usage_lock);
    for (auto* each : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      (*each)[all].current = usage[index].bytes;
      (*each)[all].peak = usage[index].peak_bytes;
    }
    stats.allocation[all].allocated = usage[index].allocations;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex index) override {
    std::lock_guard<std::mutex> guard(usage_lock);
    usage[index].peak_bytes = usage[index].bytes;
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex index) override {
    const auto taken = usage[index].bytes + kept_by_pools(index);
    return {whole_memory() - taken, whole_memory()};
  }
};

SimulatedAllocator device_allocator;

// Pinned host memory: known by its address, so that is_pinned() says what CUDA would say.
std::mutex pinned_lock;
std::map<const char*, size_t> pinned;

void free_pinned(void* memory) {
  auto* address = static_cast<const char*>(memory);
  size_t bytes = 0;
  {
    std::lock_guard<std::mutex> guard(pinned_lock);
    bytes = pinned.at(address);
    pinned.erase(address);
  }
  forget_pinned(address, bytes);
  free(memory);
}

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  auto after = pinned.upper_bound(static_cast<const char*>(pointer));
  if (after == pinned.begin()) return false;
  --after;
  return pointer < after->first + after->second;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = nullptr;
    TORCH_CHECK(!posix_memalign(&memory, 512, rounded(bytes + 1)), "out of pinned memory");
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned[static_cast<const char*>(memory)] = bytes;
    return {memory, memory, &free_pinned, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    memcpy(to, from, bytes);
  }
};

PinnedAllocator pinned_allocator;

void resize_storage(const c10::Storage& storage, int64_t bytes) {
  c10::DeviceGuard guard(storage.device());
  auto fresh = device_allocator.allocate(bytes);
  auto kept = std::min<int64_t>(bytes, storage.nbytes());
  if (kept) memcpy(fresh.get(), storage.data(), kept);
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

// ---- the current device, streams and events --------------------------------------------------

thread_local std::array<int64_t, kMostDevices> stream_of{};
std::atomic<int64_t> next_stream{1}, next_event{1};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static int index_of(Device device) { return device.has_index() ? device.index() : current_device; }
  static c10::Stream stream(Device device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, Device(kDevice, index_of(device)), id);
  }
  c10::DeviceType type() const override { return kDevice; }
  Device getDevice() const override { return {kDevice, current_device}; }
  void setDevice(Device device) const override {
    check_index(device.index());
    current_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Stream getStream(Device device) const override {
    return stream(device, stream_of[index_of(device)]);
  }
  c10::Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  c10::Stream getNewStream(Device device, int) const override {
    return stream(device, next_stream++);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override {
    return stream(device, next_stream++);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    stream_of[stream.device_index()] = stream.id();
    return before;
  }
  static Stream key(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }
  static int64_t number(void* event) { return reinterpret_cast<int64_t>(event); }
  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag)
      const override {
    if (!*event) *event = reinterpret_cast<void*>(next_event++);
    record_event(number(*event), key(stream));
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    if (event) forget_event(number(event));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) wait_for_event(key(stream), number(event));
  }
  bool queryEvent(void* event) const override {
    if (event) host_waits_for_event(number(event));
    return true;
  }
  bool queryStream(const c10::Stream& stream) const override {
    host_waits_for_stream(key(stream));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    tell_sync("synchronize");
    host_waits_for_stream(key(stream));
  }
  void synchronizeEvent(void* event) const override {
    tell_sync("synchronize");
    if (event) host_waits_for_event(number(event));
  }
  void synchronizeDevice(const DeviceIndex index) const override {
    tell_sync("synchronize");
    host_waits_for_device(index);
  }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }
  DeviceIndex deviceCount() const noexcept override { return num_devices(); }
};

// ---- random numbers --------------------------------------------------------------------------

// One of the CPU's that says that it is the device's.
class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  DeviceGenerator(at::Generator inner, DeviceIndex index)
      : GeneratorImpl(Device(kDevice, index), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        inner(std::move(inner)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  static c10::DeviceType device_type() { return kDevice; }

  mutable at::Generator inner;

 private:
  DeviceGenerator* clone_impl() const override {
    return new DeviceGenerator(inner.clone(), device().index());
  }
};

at::Generator new_generator(uint64_t seed, DeviceIndex index) {
  return at::make_generator<DeviceGenerator>(at::detail::createCPUGenerator(seed), index);
}

const at::Generator& default_generator(int index) {
  static const auto all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < kMostDevices; i++) made.push_back(new_generator(67280421310721, i));
    return made;
  }();
  return all[index < 0 ? current_device : index];
}

}  // namespace

Stream current_stream(int device) { return {device, stream_of[device]}; }
int64_t new_stream() { return next_stream++; }

REGISTER_ALLOCATOR(kDevice, &device_allocator);
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

}  // namespace simulated

namespace at {

struct SimulatedHooks : CUDAHooksInterface {
  explicit SimulatedHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return simulated::num_devices(); }
  int getNumGPUs() const override { return simulated::num_devices(); }
  DeviceIndex current_device() const override { return simulated::current_device; }
  DeviceIndex getCurrentDevice() const override { return simulated::current_device; }
  void setCurrentDevice(DeviceIndex index) const override { simulated::current_device = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    auto before = simulated::current_device;
    if (index >= 0) simulated::current_device = index;
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  bool isPinnedPtr(const void* pointer) const override { return simulated::is_pinned(pointer); }
  Allocator* getPinnedMemoryAllocator() const override { return &simulated::pinned_allocator; }
  const Generator& getDefaultGenerator(DeviceIndex index = -1) const override {
    return simulated::default_generator(index);
  }
  Generator getNewGenerator(DeviceIndex index = -1) const override {
    return simulated::new_generator(67280421310721, index < 0 ? simulated::current_device : index);
  }
  void deviceSynchronize(DeviceIndex index) const override {
    simulated::tell_sync("synchronize");
    simulated::host_waits_for_device(index < 0 ? simulated::current_device : index);
  }
};

C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, SimulatedHooks)

}  // namespace at

namespace simulated {

// ---- views of device memory on the host ------------------------------------------------------

at::Tensor Aliases::to_host(const at::Tensor& tensor) {
  if (!on_device(tensor)) return tensor;
  set_device(tensor.device());
  for (auto& [device, host] : tensors_)
    if (device.is_same(tensor)) return host;
  c10::Storage storage = tensor.storage();
  auto found = host_of_.find(storage.unsafeGetStorageImpl());
  if (found == host_of_.end()) {
    c10::DataPtr pointer(
        const_cast<void*>(storage.data()), new c10::Storage(storage),
        [](void* kept) { delete static_cast<c10::Storage*>(kept); }, c10::kCPU);
    c10::Storage alias(
        c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(pointer),
        c10::GetCPUAllocator(), /*resizable=*/true);
    device_of_.emplace(alias.unsafeGetStorageImpl(), storage);
    found = host_of_.emplace(storage.unsafeGetStorageImpl(), alias).first;
  }
  auto view = at::detail::make_tensor<at::TensorImpl>(
      c10::Storage(found->second), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(
      tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) view._set_conj(true);
  if (tensor.is_neg()) view._set_neg(true);
  tensors_.emplace_back(tensor, view);
  return view;
}

at::Tensor Aliases::to_device(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
  for (auto& [device, host] : tensors_)
    if (host.is_same(tensor)) return device;
  c10::Storage storage = tensor.storage();
  auto found = device_of_.find(storage.unsafeGetStorageImpl());
  if (found == device_of_.end()) {
    int index = device_.index() < 0 ? current_device : device_.index();
    check_memory(index, storage.nbytes());
    c10::Storage made(
        c10::Storage::use_byte_size_t(), storage.nbytes(),
        counted(const_cast<void*>(storage.data()), storage.nbytes(), index, storage),
        &device_allocator, /*resizable=*/true);
    found = device_of_.emplace(storage.unsafeGetStorageImpl(), made).first;
  }
  auto view = at::detail::make_tensor<at::TensorImpl>(
      c10::Storage(found->second), c10::DispatchKeySet(c10::DispatchKey::CUDA), tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(
      tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return view;
}

void Aliases::keep_written() {
  for (auto& [device, host] : tensors_) {
    c10::Storage storage = device.storage();
    if (host.storage().data() != storage.data()) {  // the kernel has taken other memory
      auto fresh = device_allocator.allocate(host.storage().nbytes());
      memcpy(fresh.get(), host.storage().data(), host.storage().nbytes());
      storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
      storage.unsafeGetStorageImpl()->set_nbytes(host.storage().nbytes());
    }
    if (host.sizes() != device.sizes() || host.strides() != device.strides() ||
        host.storage_offset() != device.storage_offset())
      device.unsafeGetTensorImpl()->set_sizes_and_strides(
          host.sizes(), host.strides(), host.storage_offset());
  }
}

// ---- what Python sees ------------------------------------------------------------------------

at::Generator host_generator(const at::Generator& generator) {
  TORCH_CHECK(
      generator.device().type() == kDevice,
      "Expected a 'cuda' device type for generator but found '", generator.device(), "'");
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->inner;
}

at::Tensor empty_on_device(
    c10::IntArrayRef size, std::optional<c10::IntArrayRef> stride, c10::ScalarType dtype,
    std::optional<Device> device, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  const c10::DispatchKeySet keys(c10::DispatchKey::CUDA);
  if (stride)
    return at::detail::empty_strided_generic(size, *stride, &device_allocator, keys, dtype);
  return at::detail::empty_generic(size, &device_allocator, keys, dtype, format);
}

void grow(const at::Tensor& tensor, int64_t bytes) {
  if (bytes > static_cast<int64_t>(tensor.storage().nbytes()))
    resize_storage(tensor.storage(), bytes);
}

void bind_device(py::module& module) {
  module.def("num_devices", &num_devices);
  module.def("current_device", [] { return static_cast<int>(current_device); });
  module.def("set_device", [](int index) {
    check_index(index);
    current_device = index;
  });
  module.def("memory", [](int index) {
    std::lock_guard<std::mutex> guard(usage_lock);
    auto& seen = usage[index];
    return std::make_tuple(seen.bytes, seen.peak_bytes, seen.allocations, seen.blocks);
  });
  module.def("reset_peak", [](int index) { device_allocator.resetPeakStats(index); });
  module.def("free_and_whole", [](int index) { return device_allocator.getMemoryInfo(index); });
  module.def("resize", [](const at::Tensor& bytes, int64_t size) {
    resize_storage(bytes.storage(), size);
  });
  module.def("stream", [](int index) { return stream_of[index]; });
  module.def("set_stream", [](int index, int64_t id) { stream_of[index] = id; });
  module.def("default_generator", [](int index) { return default_generator(index); });
  module.def("synchronize", &host_waits_for_device);
  module.def("wait_for_stream", [](int device, int64_t id) {
    host_waits_for_stream({device, id});
  });
  module.def("launches", [] {
    std::lock_guard<std::mutex> guard(launches_lock);
    return launches;
  });
  module.def("on_sync", [](py::object listener) {
    on_sync = nullptr;
    if (!listener.is_none())
      on_sync = [listener](const std::string& what, int64_t bytes) { listener(what, bytes); };
  });
}

}  // namespace simulated
