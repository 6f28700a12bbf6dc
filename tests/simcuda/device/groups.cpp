// Process groups of the simulated device: what NCCL refuses is refused, gloo carries the bytes.
// Also around gloo's own groups, so that the order of everything that is started can be checked.

#include "simulated.h"

#include <pthread.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <map>
#include <mutex>
#include <thread>

namespace simulated {
namespace {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using Work = c10::intrusive_ptr<c10d::Work>;
using Shapes = std::vector<std::pair<std::vector<int64_t>, std::string>>;
using SteadyClock = std::chrono::steady_clock;

std::function<void(const std::string& group, const std::string& op, const Shapes&, int, int)>
    on_operation;
thread_local bool in_batch = false;  // of batch_isend_irecv, whose messages share a communicator

// ---- who waits for whom, for the watchdog (watchdog.py) ----------------------------------------

struct Waiting {
  std::string group, op;
  int64_t number;  // of the operations of its kind: see `Group::number_of`
  int peer;
  uint64_t thread;
  SteadyClock::time_point since;
};

auto& waiting_lock = *new std::mutex;
auto& waiting = *new std::map<int64_t, Waiting>;
auto& num_started = *new std::map<std::string, int64_t>;  // by group, and by pair of a group
int64_t next_waiting = 0;

class WhileWaiting {
 public:
  explicit WhileWaiting(Waiting facts) {
    facts.thread = reinterpret_cast<uint64_t>(pthread_self());
    facts.since = SteadyClock::now();
    std::lock_guard<std::mutex> guard(waiting_lock);
    waiting[key_ = next_waiting++] = std::move(facts);
  }
  ~WhileWaiting() {
    std::lock_guard<std::mutex> guard(waiting_lock);
    waiting.erase(key_);
  }

 private:
  int64_t key_;
};

template <typename Options>
Options summed(Options options) {
  options.reduceOp = c10d::ReduceOp::SUM;
  return options;
}

// An operation that was started. On NCCL it has a stream of its own: what it writes is NaN until
// wait(), which lets the current stream come after it.
class Started : public c10d::Work {
 public:
  Started(Waiting facts) : facts(std::move(facts)) {}

  bool isCompleted() override { return gloo->isCompleted(); }
  bool isSuccess() const override { return gloo->isSuccess(); }
  std::exception_ptr exception() const override { return gloo->exception(); }
  int sourceRank() const override { return gloo->sourceRank(); }
  Tensors result() override {
    wait(kNoTimeout);
    return written_;
  }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  void abort() override { gloo->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (written_.empty()) return gloo->getFuture();
    wait(kNoTimeout);
    auto type = c10::ListType::create(c10::TensorType::get());
    auto future = c10::make_intrusive<c10::ivalue::Future>(type);
    future->markCompleted(c10::IValue(written_));
    return future;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    {
      WhileWaiting here(facts);
      gloo->wait(timeout);
    }
    std::call_once(finished_, [&] { finish(); });
    if (stream.second) wait_for_event(current_stream(stream.first), event);
    return true;
  }

  at::Tensor reads(const at::Tensor& tensor) {
    if (!stream.second) return tensor;
    use(tensor, stream, false, facts.op);
    return Aliases().to_host(tensor).clone();
  }
  at::Tensor writes(const at::Tensor& tensor, bool reads_too = false) {
    if (!stream.second) return tensor;
    use(tensor, stream, true, facts.op);
    auto host = Aliases().to_host(tensor);
    staged_.push_back(reads_too ? host.clone() : at::empty_like(host));
    written_.push_back(tensor);
    return staged_.back();
  }
  void go(c10::intrusive_ptr<c10d::Work> work, int divisor) {
    gloo = std::move(work);
    divisor_ = divisor;
    if (!stream.second) return;
    for (auto& each : written_) spoil(each.data_ptr(), each.numel() * each.itemsize());
    event = -next_event++;
    record_event(event, stream);
  }
  ~Started() override {
    if (event) forget_event(event);
  }

  Waiting facts;
  c10::intrusive_ptr<c10d::Work> gloo;
  Stream stream{0, 0};  // of its communicator; 0 on gloo
  int64_t event = 0;

 private:
  void finish() {
    at::AutoDispatchBelowADInplaceOrView below;
    for (size_t i = 0; i < staged_.size(); i++) {
      if (divisor_ > 1) staged_[i].div_(divisor_);
      Aliases().to_host(written_[i]).copy_(staged_[i]);
    }
    staged_.clear();
  }

  static inline std::atomic<int64_t> next_event{1};
  std::once_flag finished_;
  Tensors written_, staged_;
  int divisor_ = 1;
};

using Operation = c10::intrusive_ptr<Started>;

class Group : public c10d::Backend {
 public:
  Group(
      c10::intrusive_ptr<c10d::Backend> gloo, bool is_nccl, std::string id,
      c10::intrusive_ptr<c10d::Store> store)
      : Backend(gloo->getRank(), gloo->getSize()),
        gloo_(gloo), is_nccl_(is_nccl), id_(id), store_(store) {}

  const std::string getBackendName() const override { return is_nccl_ ? "nccl" : "gloo"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return num_started_; }
  void abort() override { gloo_->abort(); }
  void shutdown() override { gloo_->shutdown(); }

  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto work = start("broadcast", tensors, options.rootRank);
    const bool is_root = options.rootRank == getRank();
    auto host = is_root ? read(work, tensors) : written(work, tensors);
    return go(work, gloo_->broadcast(host, options));
  }
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto work = start("allreduce", tensors);
    auto host = changed(work, tensors);
    const bool mean = is_mean(options.reduceOp);
    return go(work, gloo_->allreduce(host, mean ? summed(options) : options), divisor(mean));
  }
  Work allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto work = start("allreduce_coalesced", tensors);
    auto host = changed(work, tensors);
    return go(work, gloo_->allreduce_coalesced(host, options));
  }
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto work = start("reduce", tensors, options.rootRank);
    const bool is_root = options.rootRank == getRank();
    auto host = is_root ? changed(work, tensors) : read(work, tensors);
    return go(work, gloo_->reduce(host, options));
  }
  Work allgather(
      TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto work = start("allgather", inputs);
    auto host = read(work, inputs);
    auto lists = written(work, outputs);
    if (is_nccl_ && is_uneven(lists[0])) return go(work, gather_uneven(lists[0], host[0]));
    return go(work, gloo_->allgather(lists, host, options));
  }
  Work allgather_coalesced(
      TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto work = start("allgather_coalesced", inputs);
    auto host = read(work, inputs);
    auto lists = written(work, outputs);
    return go(work, gloo_->allgather_coalesced(lists, host, options));
  }
  Work allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto work = start("allgather_into_tensor_coalesced", inputs);
    auto host = read(work, inputs);
    auto whole = written(work, outputs);
    return go(work, gloo_->allgather_into_tensor_coalesced(whole, host, options));
  }
  Work _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    Tensors both{input, output};
    auto work = start("_allgather_base", both);
    auto host = read(work, input);
    auto whole = written(work, output);
    return go(work, gloo_->_allgather_base(whole, host, options));
  }
  Work gather(
      TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto work = start("gather", inputs, options.rootRank);
    auto host = read(work, inputs);
    auto lists = written(work, outputs);
    return go(work, gloo_->gather(lists, host, options));
  }
  Work scatter(
      Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override {
    auto work = start("scatter", outputs, options.rootRank);
    TensorLists lists;
    for (auto& each : inputs) lists.push_back(read(work, each));
    auto host = written(work, outputs);
    return go(work, gloo_->scatter(host, lists, options));
  }
  Work reduce_scatter(
      Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override {
    auto work = start("reduce_scatter", outputs);
    TensorLists lists;
    for (auto& each : inputs) lists.push_back(read(work, each));
    auto host = written(work, outputs);
    if (is_nccl_ && is_uneven(lists[0])) return go(work, reduce_uneven(host[0], lists[0]));
    return go(work, gloo_->reduce_scatter(host, lists, options));
  }
  Work _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    Tensors both{input, output};
    auto work = start("_reduce_scatter_base", both);
    auto host = read(work, input);
    auto part = written(work, output);
    const bool mean = is_mean(options.reduceOp);
    auto used = mean ? summed(options) : options;
    return go(work, gloo_->_reduce_scatter_base(part, host, used), divisor(mean));
  }
  Work reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    auto work = start("reduce_scatter_tensor_coalesced", inputs);
    auto host = read(work, inputs);
    auto parts = written(work, outputs);
    return go(work, gloo_->reduce_scatter_tensor_coalesced(parts, host, options));
  }
  Work alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    Tensors both{input, output};
    auto work = start("alltoall_base", both);
    auto host = read(work, input);
    auto whole = written(work, output);
    return go(work, gloo_->alltoall_base(whole, host, output_sizes, input_sizes, options));
  }
  Work alltoall(
      Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    auto work = start("alltoall", inputs);
    auto host = read(work, inputs);
    auto parts = written(work, outputs);
    return go(work, gloo_->alltoall(parts, host, options));
  }
  Work send(Tensors& tensors, int to, int tag) override {
    auto work = start("send", tensors, to, tag);
    auto host = read(work, tensors);
    return go(work, gloo_->send(host, to, tag));
  }
  Work recv(Tensors& tensors, int from, int tag) override {
    auto work = start("recv", tensors, from, tag);
    auto host = written(work, tensors);
    return go(work, gloo_->recv(host, from, tag));
  }
  Work recvAnysource(Tensors& tensors, int tag) override {
    TORCH_CHECK(!is_nccl_, "ProcessGroupNCCL does not support recvAnysource");
    auto work = start("recvAnysource", tensors, -1, tag);
    return go(work, gloo_->recvAnysource(tensors, tag));
  }
  Work barrier(const c10d::BarrierOptions&) override {
    Tensors none;
    auto work = start("barrier", none);
    return go(work, gloo_->barrier(c10d::BarrierOptions{}));
  }
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all) override {
    TORCH_CHECK(!is_nccl_, "ProcessGroupNCCL does not support monitoredBarrier");
    gloo_->monitoredBarrier(options, wait_all);
  }

 private:
  // Parts of different sizes: NCCL broadcasts, or reduces, one after the other. gloo cannot.
  static bool is_uneven(const Tensors& parts) {
    for (auto& each : parts)
      if (each.sizes() != parts[0].sizes()) return true;
    return false;
  }
  Work gather_uneven(Tensors& parts, const at::Tensor& own) {
    Work last;
    parts[getRank()].copy_(own);
    for (int root = 0; root < getSize(); root++) {
      Tensors part{parts[root]};
      c10d::BroadcastOptions options;
      options.rootRank = root;
      last = gloo_->broadcast(part, options);
      last->wait();
    }
    return last;
  }
  Work reduce_uneven(at::Tensor& own, const Tensors& parts) {
    Work last;
    for (int root = 0; root < getSize(); root++) {
      Tensors part{parts[root].clone()};
      c10d::ReduceOptions options;
      options.rootRank = root;
      last = gloo_->reduce(part, options);
      last->wait();
      if (root == getRank()) own.copy_(part[0]);
    }
    return last;
  }

  bool is_mean(const c10d::ReduceOp& op) const { return is_nccl_ && op == c10d::ReduceOp::AVG; }
  int divisor(bool mean) const { return mean ? getSize() : 1; }

  void check(const at::Tensor& tensor) const {
    if (!is_nccl_) {
      TORCH_CHECK(!on_device(tensor), "gloo got a tensor on ", tensor.device());
      return;
    }
    TORCH_CHECK(
        on_device(tensor), "No backend type associated with device type ", tensor.device().type());
    TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous");
    TORCH_CHECK(
        tensor.device().index() == current_device, "nccl got a tensor on ", tensor.device(),
        " while the current device is ", static_cast<int>(current_device));
    const auto dtype = tensor.scalar_type();
    TORCH_CHECK(
        dtype != at::kComplexDouble && dtype != at::kShort && dtype != at::kUInt16,
        "Unconvertible NCCL type ", dtype);
  }

  // What gloo gets for tensors that are read, written, or both.
  at::Tensor read(Operation& work, const at::Tensor& tensor) {
    check(tensor);
    return work->reads(tensor);
  }
  at::Tensor written(Operation& work, const at::Tensor& tensor, bool reads_too = false) {
    check(tensor);
    return work->writes(tensor, reads_too);
  }
  Tensors read(Operation& work, const Tensors& tensors) {
    Tensors host;
    for (auto& each : tensors) host.push_back(read(work, each));
    return host;
  }
  Tensors written(Operation& work, const Tensors& tensors, bool reads_too = false) {
    Tensors host;
    for (auto& each : tensors) host.push_back(written(work, each, reads_too));
    return host;
  }
  Tensors changed(Operation& work, const Tensors& tensors) { return written(work, tensors, true); }
  TensorLists written(Operation& work, const TensorLists& lists) {
    TensorLists host;
    for (auto& each : lists) host.push_back(written(work, each));
    return host;
  }

  Operation start(const char* op, Tensors& tensors, int peer = -1, int tag = 0) {
    num_started_++;
    for (auto& each : tensors) check(each);
    if (on_operation) {
      Shapes shapes;
      for (auto& each : tensors)
        shapes.emplace_back(each.sizes().vec(), c10::toString(each.scalar_type()));
      py::gil_scoped_acquire gil;
      on_operation(id_, op, shapes, peer, tag);
    }
    const std::string name = op;
    const bool is_message = name == "send" || name == "recv";
    auto work = c10::make_intrusive<Started>(
        Waiting{id_, name, number_of(name, peer), is_message ? peer : -1});
    if (is_nccl_) {
      join(work->facts, is_message && !in_batch ? peer : -1);
      work->stream = {current_device, stream_of(is_message && !in_batch ? peer : -1)};
      wait_for_stream(work->stream, current_stream(current_device));
    }
    return work;
  }
  Work go(Operation& work, Work gloo, int divisor = 1) {
    work->go(std::move(gloo), divisor);
    return work;
  }

  // The how manieth operation of the group, or message of a pair.
  int64_t number_of(const std::string& op, int peer) {
    auto key = id_;
    if (op == "send" || op == "recv") key += "|" + op + "|" + std::to_string(peer);
    std::lock_guard<std::mutex> guard(waiting_lock);
    return ++simulated::num_started[key];
  }

  // One stream for the group's communicator, and one for that of a pair.
  int64_t stream_of(int peer) {
    std::lock_guard<std::mutex> guard(lock_);
    auto& id = streams_[peer];
    if (!id) {
      id = new_stream();
      name_stream({current_device, id}, "the stream of " + id_);
    }
    return id;
  }

  // The first use makes the communicator: it blocks until all of its ranks have come, and no two of
  // them may have the same device. A message outside of batch_isend_irecv has one of its pair.
  void join(Waiting facts, int peer) {
    {
      std::lock_guard<std::mutex> guard(lock_);
      if (!joined_.insert(peer).second) return;
    }
    std::vector<int> ranks;
    for (int rank = 0; rank < getSize(); rank++)
      if (peer < 0 || rank == peer || rank == getRank()) ranks.push_back(rank);
    if (ranks.size() == 1) return;
    std::string prefix = "simulated nccl ";
    for (int rank : ranks) prefix += std::to_string(rank) + (peer < 0 ? "," : "-");
    auto key_of = [&](int rank) { return prefix + " rank " + std::to_string(rank); };
    const char* node = getenv("GROUP_RANK");
    auto place_of = std::string(node ? node : "0") + ":" + std::to_string(current_device);
    store_->set(key_of(getRank()), place_of);
    facts.op = "first use, by " + facts.op;
    facts.peer = peer;
    WhileWaiting here(facts);
    std::map<std::string, int> places;
    for (int rank : ranks) {
      for (int millis = 1; !store_->check({key_of(rank)}); millis = std::min(2 * millis, 50))
        std::this_thread::sleep_for(std::chrono::milliseconds(millis));
      auto place = store_->get_to_str(key_of(rank));
      auto [other, is_first] = places.emplace(place, rank);
      TORCH_CHECK_WITH(
          DistBackendError, is_first, "NCCL error: ncclInvalidUsage: Duplicate GPU detected : rank ",
          other->second, " and rank ", rank, " both on CUDA device ",
          place.substr(place.find(':') + 1), " (", id_, ")");
    }
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  bool is_nccl_;
  std::string id_;
  c10::intrusive_ptr<c10d::Store> store_;
  uint64_t num_started_ = 0;
  std::mutex lock_;
  std::set<int> joined_;
  std::map<int, int64_t> streams_;
};

}  // namespace

void bind_groups(py::module& module) {
  py::module::import("torch.distributed");
  py::class_<Group, c10d::Backend, c10::intrusive_ptr<Group>>(module, "Group", py::dynamic_attr())
      .def(py::init<
           c10::intrusive_ptr<c10d::Backend>, bool, std::string,
           c10::intrusive_ptr<c10d::Store>>())
      .def_property_readonly("options", [](Group& self) { return self.getBackendOptions(); });
  module.def("in_batch", [](bool value) { return std::exchange(in_batch, value); });
  module.def("started", [] {
    std::lock_guard<std::mutex> guard(waiting_lock);
    return num_started;
  });
  module.def("waiting", [] {
    py::list found;
    std::lock_guard<std::mutex> guard(waiting_lock);
    for (auto& [key, each] : waiting) {
      const std::chrono::duration<double> seconds = SteadyClock::now() - each.since;
      found.append(py::make_tuple(
          each.group, each.op, each.number, each.peer, each.thread, seconds.count()));
    }
    return found;
  });
  module.def("on_operation", [](py::object listener) {
    on_operation = nullptr;
    if (!listener.is_none())
      on_operation = [listener](const std::string& group, const std::string& op,
                                const Shapes& shapes, int peer, int tag) {
        listener(group, op, shapes, peer, tag);
      };
  });
}

}  // namespace simulated

PYBIND11_MODULE(simulated_cuda, module) {
  simulated::bind_device(module);
  simulated::bind_kernels(module);
  simulated::bind_pools(module);
  simulated::bind_groups(module);
  for (auto* name : {"on_sync", "on_segment", "on_operation"})  // no Python after its end
    py::module::import("atexit").attr("register")(module.attr(name), py::none());
}
