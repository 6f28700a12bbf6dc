// The order of a device's work: streams, events, and memory that two streams use.
//
// CUDA runs the work of one stream in order, and that of two streams at any time, unless an event
// or a wait of the host is between them. Here all work is done at once, so that a missing wait would
// change nothing: it is an error instead, as in torch/cuda/_sanitizer.py, but for every thread and
// for ranges of bytes. Copies between a device and pinned memory are finished when the host waits.

#include "simulated.h"

#include <map>
#include <mutex>
#include <set>

namespace simulated {

namespace {

using Clock = std::map<Stream, uint64_t>;  // of each stream, the last piece of work that is known

struct Use {  // of some bytes of a block by one stream
  int64_t first, last;
  uint64_t read = 0, written = 0;  // numbers of the last pieces of work
  std::string reader, writer;      // their operators
};

struct UsedBlock {
  Stream owner;  // on which it was allocated, and on which it is given out again
  int64_t bytes;
  std::map<Stream, std::vector<Use>> uses;
  std::set<Stream> recorded;  // record_stream
};

struct Freed {  // while another stream than the owner still worked with it
  Stream owner, user;
  int64_t bytes;
  uint64_t number;
  std::string op;
};

struct HostCopy {  // between a device and pinned memory, until the host has waited for it
  Stream stream;
  uint64_t number;
  at::Tensor target, values;  // device to host: the values that arrive
  const char* source;         // host to device: what must not change meanwhile
  int64_t bytes;
  size_t hash;
};

// Never destroyed: memory is freed until the very end of a process.
auto& lock = *new std::mutex;
uint64_t last_number = 0;
auto& clocks = *new std::map<Stream, Clock>;
auto& host_clock = *new Clock;
auto& events = *new std::map<int64_t, Clock>;
auto& blocks = *new std::unordered_map<const void*, UsedBlock>;
auto& freed = *new std::vector<Freed>;
auto& copies = *new std::vector<HostCopy>;
auto& names = *new std::map<Stream, std::string>;

constexpr size_t kMostUses = 64;
constexpr size_t kMostFreed = 256;

using Locked = std::lock_guard<std::mutex>;

Clock& clock_of(Stream stream) { return clocks.try_emplace(stream, host_clock).first->second; }

void merge(Clock& clock, const Clock& other) {
  for (auto& [stream, number] : other) clock[stream] = std::max(clock[stream], number);
}

std::string name_of(Stream stream) {
  auto found = names.find(stream);
  if (found != names.end()) return found->second;
  return "stream " + std::to_string(stream.second);
}

bool comes_after(Stream stream, Stream other, uint64_t number) {
  return stream == other || number <= clock_of(stream)[other];
}

std::pair<int64_t, int64_t> range_of(const at::Tensor& tensor) {
  int64_t last = tensor.storage_offset();
  for (int64_t dim = 0; dim < tensor.dim(); dim++)
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return {tensor.storage_offset() * tensor.itemsize(), (last + 1) * tensor.itemsize()};
}

void check_use(
    const UsedBlock& block, Stream stream, int64_t first, int64_t last, bool writes,
    const std::string& op, int device) {
  for (auto& [other, uses] : block.uses) {
    if (other == stream) continue;
    for (auto& use : uses) {
      if (use.last <= first || last <= use.first) continue;
      const bool after_write = !comes_after(stream, other, use.written);
      const bool after_read = writes && !comes_after(stream, other, use.read);
      TORCH_CHECK(
          !after_write && !after_read, "stream race on cuda:", device, ": ", op, " on ",
          name_of(stream), writes ? " writes" : " reads", " memory that ",
          after_write ? use.writer : use.reader, " on ", name_of(other),
          after_write ? " writes" : " reads",
          ", and nothing orders the two; wait for an event of the other stream (wait_stream, "
          "wait_event, work.wait) or synchronize");
    }
  }
}

void keep_use(
    UsedBlock& block, Stream stream, int64_t first, int64_t last, bool writes, const std::string& op,
    uint64_t number) {
  auto& uses = block.uses[stream];
  auto same = std::find_if(uses.begin(), uses.end(), [&](auto& use) {
    return use.first == first && use.last == last;
  });
  if (same == uses.end()) {
    if (uses.size() >= kMostUses) uses.erase(uses.begin());
    uses.push_back({first, last});
    same = uses.end() - 1;
  }
  (writes ? same->written : same->read) = number;
  (writes ? same->writer : same->reader) = op;
}

uint64_t begin_work(Stream stream) { return clock_of(stream)[stream] = ++last_number; }

size_t hash_of(const char* memory, int64_t bytes) {
  return std::hash<std::string_view>{}({memory, static_cast<size_t>(bytes)});
}

bool overlaps(const HostCopy& copy, const char* memory, int64_t bytes) {
  const char* start =
      copy.source ? copy.source : static_cast<const char*>(copy.target.const_data_ptr());
  return start < memory + bytes && memory < start + copy.bytes;
}

// Another copy of the same pinned memory must come after one that is on its way.
void check_pinned(const char* memory, int64_t bytes, Stream stream, bool writes) {
  for (auto& copy : copies) {
    if (!overlaps(copy, memory, bytes) || comes_after(stream, copy.stream, copy.number)) continue;
    TORCH_CHECK(
        copy.source && !writes, "stream race: a copy on ", name_of(stream),
        " uses pinned memory that a copy on ", name_of(copy.stream), copy.source ? " reads" : " writes",
        ", and nothing orders the two; wait for an event of the other stream or synchronize");
  }
}

void finish(HostCopy& copy) {
  if (!copy.source) {
    at::AutoDispatchBelowADInplaceOrView below;
    copy.target.copy_(copy.values);
    return;
  }
  TORCH_CHECK(
      hash_of(copy.source, copy.bytes) == copy.hash,
      "pinned memory was written by the host before ", name_of(copy.stream),
      " had copied it to the device; wait for the copy first, or use other memory");
}

// Finishes copies that are known to be done. The caller destroys them without the lock: the end of
// a tensor may wait for Python.
template <typename Done>
std::vector<HostCopy> finish_where(Done done) {
  std::vector<HostCopy> found;
  std::erase_if(copies, [&](auto& copy) {
    if (!done(copy)) return false;
    found.push_back(std::move(copy));
    return true;
  });
  for (auto& copy : found) finish(copy);
  return found;
}

std::vector<HostCopy> host_waits_for(const Clock& clock) {
  merge(host_clock, clock);
  for (auto& [stream, known] : clocks) merge(known, clock);
  return finish_where([&](auto& copy) { return copy.number <= host_clock[copy.stream]; });
}

}  // namespace

void name_stream(Stream stream, std::string name) {
  Locked locked(lock);
  names[stream] = std::move(name);
}

void record_event(int64_t event, Stream stream) {
  Locked locked(lock);
  events[event] = clock_of(stream);
}

void forget_event(int64_t event) {
  Locked locked(lock);
  events.erase(event);
}

void wait_for_event(Stream stream, int64_t event) {
  Locked locked(lock);
  merge(clock_of(stream), events[event]);
}

void wait_for_stream(Stream stream, Stream other) {
  Locked locked(lock);
  merge(clock_of(stream), clock_of(other));
}

void host_waits_for_event(int64_t event) {
  std::vector<HostCopy> done;
  Locked locked(lock);
  done = host_waits_for(Clock(events[event]));
}

void host_waits_for_stream(Stream stream) {
  std::vector<HostCopy> done;
  Locked locked(lock);
  done = host_waits_for(Clock(clock_of(stream)));
}

void host_waits_for_device(int device) {
  std::vector<HostCopy> done;
  Locked locked(lock);
  Clock all;
  for (auto& [stream, clock] : clocks)
    if (stream.first == device) merge(all, clock);
  done = host_waits_for(all);
}

void use(const at::Tensor& tensor, Stream stream, bool writes, const std::string& op) {
  if (!on_device(tensor) || !tensor.numel() || !tensor.has_storage()) return;
  Locked locked(lock);
  auto found = blocks.find(tensor.storage().data());
  if (found == blocks.end()) return;
  auto [first, last] = range_of(tensor);
  check_use(found->second, stream, first, last, writes, op, stream.first);
  keep_use(found->second, stream, first, last, writes, op, begin_work(stream));
}

void record_use(const at::Tensor& tensor, Stream stream) {
  Locked locked(lock);
  auto found = blocks.find(tensor.storage().data());
  if (found != blocks.end()) found->second.recorded.insert(stream);
}

void check_reuse(Stream stream, int64_t bytes) {
  Locked locked(lock);
  for (auto each = freed.begin(); each != freed.end();) {
    if (comes_after(each->owner, each->user, each->number)) {
      each = freed.erase(each);
      continue;
    }
    TORCH_CHECK(
        each->owner != stream || bytes > each->bytes, "stream race on cuda:", stream.first,
        ": memory of ", name_of(stream), " is given out again while ", each->op, " on ",
        name_of(each->user), " may still use it: it was freed too early; call record_stream, or "
        "wait for that stream before the tensor is freed");
    each++;
  }
}

void add_block(const void* memory, int64_t bytes, Stream owner) {
  if (!memory) return;
  Locked locked(lock);
  blocks[memory] = {owner, bytes};
}

void remove_block(const void* memory) {
  Locked locked(lock);
  auto found = blocks.find(memory);
  if (found == blocks.end()) return;
  auto& block = found->second;
  for (auto& [stream, uses] : block.uses) {
    // a communicator keeps what it works with
    if (stream == block.owner || block.recorded.count(stream) || names.count(stream)) continue;
    for (auto& use : uses) {
      const auto number = std::max(use.read, use.written);
      if (comes_after(block.owner, stream, number)) continue;
      if (freed.size() >= kMostFreed) freed.erase(freed.begin());
      const auto& op = use.read > use.written ? use.reader : use.writer;
      freed.push_back({block.owner, stream, block.bytes, number, op});
    }
  }
  blocks.erase(found);
}

void copy_to_pinned(at::Tensor& target, const at::Tensor& source, Stream stream) {
  at::Tensor values = at::empty_like(target).copy_(source);
  if (!target.is_contiguous()) {
    target.copy_(values);
    return;
  }
  std::vector<HostCopy> done;
  Locked locked(lock);
  auto* memory = static_cast<char*>(target.data_ptr());
  const int64_t bytes = target.numel() * target.itemsize();
  check_pinned(memory, bytes, stream, /*writes=*/true);
  done = finish_where([&](auto& copy) { return overlaps(copy, memory, bytes); });
  spoil(memory, bytes);
  copies.push_back({stream, clock_of(stream)[stream], target.detach(), values, nullptr, bytes, 0});
}

void copy_from_pinned(const at::Tensor& source, Stream stream) {
  if (!source.is_contiguous()) return;
  std::vector<HostCopy> done;
  Locked locked(lock);
  auto* memory = static_cast<const char*>(source.const_data_ptr());
  const int64_t bytes = source.numel() * source.itemsize();
  check_pinned(memory, bytes, stream, /*writes=*/false);
  done = finish_where([&](auto& copy) { return !copy.source && overlaps(copy, memory, bytes); });
  const auto number = clock_of(stream)[stream];
  copies.push_back({stream, number, {}, {}, memory, bytes, hash_of(memory, bytes)});
}

void forget_pinned(const char* memory, int64_t bytes) {
  Locked locked(lock);
  std::erase_if(copies, [&](auto& copy) { return copy.source && overlaps(copy, memory, bytes); });
}

}  // namespace simulated
