// What the parts of the simulated device share: its type, its memory, and what it tells Python.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace simulated {

constexpr auto kDevice = c10::DeviceType::CUDA;
constexpr int kMostDevices = 64;

extern thread_local c10::DeviceIndex current_device;

inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDevice;
}

// Calls of Python, empty while nobody listens; called with the GIL held.
extern std::function<void(const std::string& what, int64_t bytes)> on_sync;
void tell_sync(const std::string& what, int64_t bytes = 0);
// How often each operator was started on a device; views and copies to or from the host are none.
void count_launch(const std::string& name);

// Views of one operator call's tensors on the host, and the way back: no byte is copied.
class Aliases {
 public:
  at::Tensor to_host(const at::Tensor& tensor);
  at::Tensor to_device(const at::Tensor& tensor);
  // Brings the sizes and the storage of written arguments back: out= may have resized them.
  void keep_written();
  void set_device(c10::Device device) { if (device_.index() < 0) device_ = device; }

 private:
  std::unordered_map<c10::StorageImpl*, c10::Storage> host_of_, device_of_;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;  // (on the device, on the host)
  c10::Device device_{kDevice, -1};
};

// Streams (streams.cpp): what two of them do with the same memory must be ordered.
using Stream = std::pair<int, int64_t>;  // device, id
Stream current_stream(int device);
int64_t new_stream();
void name_stream(Stream stream, std::string name);  // of a communicator
void record_event(int64_t event, Stream stream);
void forget_event(int64_t event);
void wait_for_event(Stream stream, int64_t event);
void wait_for_stream(Stream stream, Stream other);
void host_waits_for_event(int64_t event);
void host_waits_for_stream(Stream stream);
void host_waits_for_device(int device);
// An operator reads or writes a tensor's memory on a stream: an error if it may be another's turn.
void use(const at::Tensor& tensor, Stream stream, bool writes, const std::string& op);
void record_use(const at::Tensor& tensor, Stream stream);  // record_stream
void check_reuse(Stream stream, int64_t bytes);            // before memory is given out
void add_block(const void* memory, int64_t bytes, Stream owner);
void remove_block(const void* memory);
// Values of a copy arrive in pinned memory when the host waits; until then it holds NaN.
void copy_to_pinned(at::Tensor& target, const at::Tensor& source, Stream stream);
void copy_from_pinned(const at::Tensor& source, Stream stream);
void forget_pinned(const char* memory, int64_t bytes);

// Memory: how many bytes a device's tensors take, and what memory holds that nobody has written.
int64_t rounded(int64_t bytes);
void count(int device, int64_t bytes);
// OutOfMemoryError if the device has no such bytes left.
void check_memory(int device, int64_t bytes);
void spoil(void* memory, int64_t bytes);
bool in_pool();
c10::DataPtr allocate_in_pool(int64_t bytes);
// What the driver counts beyond tensors: pools keep free segments, and what sleeps takes nothing.
int64_t kept_by_pools(int device);

at::Generator host_generator(const at::Generator& generator);
at::Tensor empty_on_device(
    c10::IntArrayRef size, std::optional<c10::IntArrayRef> stride, c10::ScalarType dtype,
    std::optional<c10::Device> device, std::optional<c10::MemoryFormat> format);
// Takes more memory if a tensor's storage has fewer bytes.
void grow(const at::Tensor& tensor, int64_t bytes);

void bind_device(py::module& module);
void bind_kernels(py::module& module);
void bind_pools(py::module& module);
void bind_groups(py::module& module);

}  // namespace simulated
