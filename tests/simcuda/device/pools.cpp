// Memory pools: segments whose memory can be taken away and given back under the same address,
// as vLLM's sleeping allocator does it. Access to what sleeps ends the process (SIGSEGV).

#include "simulated.h"

#include <sys/mman.h>

#include <map>
#include <mutex>

namespace simulated {

namespace {

struct Segment {
  int64_t bytes;
  int device;
  int64_t pool;
  bool in_use, mapped;
};

std::mutex segments_lock;
std::map<void*, Segment> segments;
thread_local int64_t current_pool = 0;
std::function<void(py::tuple)> on_segment;

void free_segment(void* memory) {  // the pool keeps it until it is unmapped
  remove_block(memory);
  std::lock_guard<std::mutex> guard(segments_lock);
  auto& segment = segments.at(memory);
  segment.in_use = false;
  count(segment.device, -segment.bytes);
  if (segment.mapped) spoil(memory, segment.bytes);
}

void* free_of_size(int64_t bytes) {
  for (auto& [memory, segment] : segments)
    if (!segment.in_use && segment.mapped && segment.pool == current_pool &&
        segment.bytes == bytes && segment.device == current_device)
      return memory;
  return nullptr;
}

void unmap(int, int64_t bytes, int64_t address, int64_t) {
  auto* memory = reinterpret_cast<void*>(address);
  std::lock_guard<std::mutex> guard(segments_lock);
  auto& segment = segments.at(memory);
  TORCH_CHECK(segment.mapped && segment.bytes == bytes, "CUDA driver error: not mapped");
  if (!segment.in_use) {
    munmap(memory, bytes);
    segments.erase(memory);
    return;
  }
  madvise(memory, bytes, MADV_DONTNEED);
  mprotect(memory, bytes, PROT_NONE);
  segment.mapped = false;
}

void map_again(int, int64_t bytes, int64_t address, int64_t) {
  auto* memory = reinterpret_cast<void*>(address);
  std::lock_guard<std::mutex> guard(segments_lock);
  auto& segment = segments.at(memory);
  TORCH_CHECK(!segment.mapped, "CUDA driver error: mapped already");
  mprotect(memory, bytes, PROT_READ | PROT_WRITE);
  spoil(memory, bytes);
  segment.mapped = true;
}

}  // namespace

bool in_pool() { return current_pool != 0; }

c10::DataPtr allocate_in_pool(int64_t bytes) {
  bytes = (rounded(bytes) + 4095) / 4096 * 4096;
  const int device = current_device;
  void* memory = nullptr;
  bool is_new = false;
  {
    std::lock_guard<std::mutex> guard(segments_lock);
    memory = free_of_size(bytes);
    if (memory == nullptr) {
      is_new = true;
      memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      TORCH_CHECK(memory != MAP_FAILED, "the host is out of memory");
      segments[memory] = {bytes, device, current_pool, true, true};
      spoil(memory, bytes);
    }
    segments[memory].in_use = true;
    count(device, bytes);
    add_block(memory, bytes, current_stream(device));
  }
  if (is_new && on_segment) {
    py::gil_scoped_acquire gil;
    on_segment(py::make_tuple(device, bytes, reinterpret_cast<int64_t>(memory), 0));
  }
  return {memory, memory, &free_segment, c10::Device(kDevice, device)};
}

int64_t kept_by_pools(int device) {
  std::lock_guard<std::mutex> guard(segments_lock);
  int64_t total = 0;
  for (auto& [memory, segment] : segments)
    if (segment.device == device)
      total += segment.bytes * (segment.mapped - segment.in_use);
  return total;
}

void bind_pools(py::module& module) {
  module.def("use_pool", [](int64_t pool) { return std::exchange(current_pool, pool); });
  module.def("unmap", &unmap);
  module.def("map_again", &map_again);
  module.def("on_segment", [](py::object listener) {
    on_segment = nullptr;
    if (!listener.is_none()) on_segment = [listener](py::tuple handle) { listener(handle); };
  });
  module.def("snapshot", [](int64_t pool) {
    py::list found;
    std::lock_guard<std::mutex> guard(segments_lock);
    for (auto& [memory, segment] : segments) {
      if (segment.pool != pool) continue;
      py::dict each;
      each["address"] = reinterpret_cast<int64_t>(memory);
      each["total_size"] = segment.bytes;
      each["allocated_size"] = segment.in_use ? segment.bytes : 0;
      found.append(each);
    }
    return found;
  });
}

}  // namespace simulated
