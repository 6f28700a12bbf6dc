// Process groups of the simulated device: what NCCL refuses is refused, gloo carries the bytes.
// Also around gloo's own groups, so that the order of everything that is started can be checked.

#include "simulated.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace simulated {
namespace {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using Work = c10::intrusive_ptr<c10d::Work>;
using Shapes = std::vector<std::pair<std::vector<int64_t>, std::string>>;

std::function<void(const std::string& group, const std::string& op, const Shapes&, int, int)>
    on_operation;

template <typename Options>
Options summed(Options options) {
  options.reduceOp = c10d::ReduceOp::SUM;
  return options;
}

class Group : public c10d::Backend {
 public:
  Group(c10::intrusive_ptr<c10d::Backend> gloo, bool is_nccl, std::string id)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(gloo), is_nccl_(is_nccl), id_(id) {}

  const std::string getBackendName() const override { return is_nccl_ ? "nccl" : "gloo"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return num_started_; }
  void abort() override { gloo_->abort(); }
  void shutdown() override { gloo_->shutdown(); }

  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto host = start("broadcast", tensors, options.rootRank);
    return gloo_->broadcast(host, options);
  }
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto host = start("allreduce", tensors);
    if (!is_mean(options.reduceOp)) return gloo_->allreduce(host, options);
    return divided(gloo_->allreduce(host, summed(options)), host);
  }
  Work allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto host = start("allreduce_coalesced", tensors);
    return gloo_->allreduce_coalesced(host, options);
  }
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto host = start("reduce", tensors, options.rootRank);
    return gloo_->reduce(host, options);
  }
  Work allgather(
      TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto host = start("allgather", inputs);
    auto lists = on_host(outputs);
    return gloo_->allgather(lists, host, options);
  }
  Work allgather_coalesced(
      TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto host = start("allgather_coalesced", inputs);
    auto lists = on_host(outputs);
    return gloo_->allgather_coalesced(lists, host, options);
  }
  Work allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto host = start("allgather_into_tensor_coalesced", inputs);
    auto whole = on_host(outputs);
    return gloo_->allgather_into_tensor_coalesced(whole, host, options);
  }
  Work _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    Tensors both{input, output};
    auto host = start("_allgather_base", both);
    return gloo_->_allgather_base(host[1], host[0], options);
  }
  Work gather(
      TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto host = start("gather", inputs, options.rootRank);
    auto lists = on_host(outputs);
    return gloo_->gather(lists, host, options);
  }
  Work scatter(
      Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override {
    auto host = start("scatter", outputs, options.rootRank);
    auto lists = on_host(inputs);
    return gloo_->scatter(host, lists, options);
  }
  Work reduce_scatter(
      Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override {
    auto host = start("reduce_scatter", outputs);
    auto lists = on_host(inputs);
    return gloo_->reduce_scatter(host, lists, options);
  }
  Work _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    Tensors both{input, output};
    auto host = start("_reduce_scatter_base", both);
    if (!is_mean(options.reduceOp))
      return gloo_->_reduce_scatter_base(host[1], host[0], options);
    auto work = gloo_->_reduce_scatter_base(host[1], host[0], summed(options));
    return divided(work, {host[1]});
  }
  Work reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    auto host = start("reduce_scatter_tensor_coalesced", inputs);
    auto parts = on_host(outputs);
    return gloo_->reduce_scatter_tensor_coalesced(parts, host, options);
  }
  Work alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    Tensors both{input, output};
    auto host = start("alltoall_base", both);
    return gloo_->alltoall_base(host[1], host[0], output_sizes, input_sizes, options);
  }
  Work alltoall(
      Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    auto host = start("alltoall", inputs);
    auto parts = on_host(outputs);
    return gloo_->alltoall(parts, host, options);
  }
  Work send(Tensors& tensors, int to, int tag) override {
    auto host = start("send", tensors, to, tag);
    return gloo_->send(host, to, tag);
  }
  Work recv(Tensors& tensors, int from, int tag) override {
    auto host = start("recv", tensors, from, tag);
    return gloo_->recv(host, from, tag);
  }
  Work recvAnysource(Tensors& tensors, int tag) override {
    TORCH_CHECK(!is_nccl_, "ProcessGroupNCCL does not support recvAnysource");
    auto host = start("recvAnysource", tensors, -1, tag);
    return gloo_->recvAnysource(host, tag);
  }
  Work barrier(const c10d::BarrierOptions&) override {
    Tensors none;
    start("barrier", none);
    return gloo_->barrier(c10d::BarrierOptions{});
  }
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all) override {
    TORCH_CHECK(!is_nccl_, "ProcessGroupNCCL does not support monitoredBarrier");
    gloo_->monitoredBarrier(options, wait_all);
  }

 private:
  bool is_mean(const c10d::ReduceOp& op) const { return is_nccl_ && op == c10d::ReduceOp::AVG; }

  Work divided(Work work, const Tensors& tensors) {
    work->wait();
    for (auto& each : tensors) each.div_(getSize());
    return work;
  }

  at::Tensor on_host(const at::Tensor& tensor) {
    if (!is_nccl_) {
      TORCH_CHECK(!on_device(tensor), "gloo got a tensor on ", tensor.device());
      return tensor;
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
    return Aliases().to_host(tensor);
  }
  Tensors on_host(const Tensors& tensors) {
    Tensors host;
    for (auto& each : tensors) host.push_back(on_host(each));
    return host;
  }
  TensorLists on_host(const TensorLists& lists) {
    TensorLists host;
    for (auto& each : lists) host.push_back(on_host(each));
    return host;
  }

  Tensors start(const char* op, Tensors& tensors, int peer = -1, int tag = 0) {
    num_started_++;
    if (on_operation) {
      Shapes shapes;
      for (auto& each : tensors)
        shapes.emplace_back(each.sizes().vec(), c10::toString(each.scalar_type()));
      py::gil_scoped_acquire gil;
      on_operation(id_, op, shapes, peer, tag);
    }
    return on_host(tensors);
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  bool is_nccl_;
  std::string id_;
  uint64_t num_started_ = 0;
};

}  // namespace

void bind_groups(py::module& module) {
  py::module::import("torch.distributed");
  py::class_<Group, c10d::Backend, c10::intrusive_ptr<Group>>(module, "Group", py::dynamic_attr())
      .def(py::init<c10::intrusive_ptr<c10d::Backend>, bool, std::string>())
      .def_property_readonly("options", [](Group& self) { return self.getBackendOptions(); });
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
  simulated::bind_pools(module);
  simulated::bind_groups(module);
  for (auto* name : {"on_sync", "on_segment", "on_operation"})  // no Python after its end
    py::module::import("atexit").attr("register")(module.attr(name), py::none());
}
