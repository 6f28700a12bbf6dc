// Operators of the simulated device: each runs the CPU's kernel on views of the same memory, after
// the check that CUDA's code does: tensors of one device, host scalars and host indices allowed.

#include "simulated.h"

#include <ATen/native/ConvUtils.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <unordered_set>

namespace simulated {

using c10::Device;

namespace {

using Names = std::unordered_set<std::string>;

const Names kTakesHostIndices = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
    "aten::_unsafe_index", "aten::_unsafe_index_put"};
const Names kWaits = {  // their result, or its size, is known on the host only after a wait
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave",
    "aten::bincount"};

template <typename Visit>
void for_tensors(c10::ArrayRef<c10::IValue> values, Visit visit) {
  for (auto& value : values) {
    if (value.isTensor()) visit(value.toTensor());
    else if (value.isTensorList())
      for (const at::Tensor& each : value.toTensorVector()) visit(each);
    else if (value.isOptionalTensorList())
      for (const auto& each : value.toOptionalTensorVector())
        if (each) visit(*each);
  }
}

template <typename Change>
c10::IValue with_tensors(const c10::IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) list.push_back(change(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& each : value.toOptionalTensorVector())
      list.push_back(each ? std::optional<at::Tensor>(change(*each)) : std::nullopt);
    return list;
  }
  return value;
}

bool has_generator(c10::ArrayRef<c10::IValue> values) {
  return std::any_of(values.begin(), values.end(), [](auto& each) { return each.isGenerator(); });
}

void check_devices(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  Device first(kDevice, -1);
  bool with_host = false;
  const bool takes_host_indices = kTakesHostIndices.count(op.schema().name());
  for (auto& argument : arguments) {
    const bool is_index = takes_host_indices && argument.isOptionalTensorList();
    for_tensors(argument, [&](const at::Tensor& tensor) {
      if (on_device(tensor)) {
        TORCH_CHECK(
            first.index() < 0 || first == tensor.device(),
            "Expected all tensors to be on the same device, but found at least two devices, ",
            first, " and ", tensor.device(), "! (", op.schema().operator_name(), ")");
        first = tensor.device();
      } else if (tensor.defined() && tensor.device().is_cpu() && tensor.dim() > 0) {
        with_host = with_host || !is_index;
      }
    });
  }
  TORCH_CHECK(
      !with_host || first.index() < 0,
      "Expected all tensors to be on the same device, but found at least two devices, ", first,
      " and cpu! (", op.schema().operator_name(), ")");
  TORCH_CHECK(
      !with_host || first.index() >= 0 || !has_generator(arguments),
      "Expected a 'cpu' device type for generator but found 'cuda'");
}

bool is_fused(const c10::OperatorHandle& op) {
  return op.schema().name().rfind("aten::_fused_ada", 0) == 0 ||
      op.schema().name().rfind("aten::_fused_sgd", 0) == 0;
}

// Their kernel reads every tensor of its lists, the step counters too.
void check_fused(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  for (auto& argument : arguments)
    if (argument.isTensorList())
      for (const at::Tensor& each : argument.toTensorVector())
        TORCH_CHECK(
            on_device(each), op.schema().name(), " got a tensor on ", each.device(),
            ", expected all of params, grads, moments and state_steps on the device");
}

// What an operator reads and writes, on the current stream; a view touches no memory.
void use_arguments(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> values) {
  const auto& schema = op.schema();
  for (size_t i = 0; i < values.size(); i++) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias && !alias->isWrite()) continue;
    for_tensors(values.slice(i, 1), [&](const at::Tensor& each) {
      if (on_device(each))
        use(each, current_stream(each.device().index()), alias != nullptr, schema.name());
    });
  }
}

void use_results(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> values) {
  for (size_t i = 0; i < values.size(); i++)
    if (!op.schema().returns()[i].alias_info())
      for_tensors(values.slice(i, 1), [&](const at::Tensor& each) {
        if (on_device(each))
          use(each, current_stream(each.device().index()), true, op.schema().name());
      });
}

// The host waits for the current stream.
void wait_here(const std::string& what, int device, int64_t bytes = 0) {
  tell_sync(what, bytes);
  host_waits_for_stream(current_stream(device));
}

// A mask as index: CUDA looks for its ones first, and the host waits for their number. (`index`
// does that by an operator of its own.) A single value of the host is filled in without a wait.
bool writes_by_mask(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  if (op.schema().name().find("index_put") == std::string::npos) return false;
  const auto& values = arguments[2].toTensor();
  if (values.numel() == 1 && values.device().is_cpu()) return false;
  bool found = false;
  for_tensors(arguments.slice(1, 1), [&](const at::Tensor& each) {
    const auto dtype = each.scalar_type();
    found = found || (on_device(each) && (dtype == at::kBool || dtype == at::kByte));
  });
  return found;
}

int device_of(c10::ArrayRef<c10::IValue> arguments) {
  int device = current_device;
  for_tensors(arguments, [&](const at::Tensor& each) {
    if (on_device(each)) device = each.device().index();
  });
  return device;
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  const auto& schema = op.schema();
  const auto num_arguments = schema.arguments().size();
  const auto arguments = torch::jit::last(*stack, num_arguments);
  check_devices(op, arguments);
  if (is_fused(op)) check_fused(op, arguments);
  use_arguments(op, arguments);
  if (kWaits.count(schema.name()) || writes_by_mask(op, arguments)) wait_here(schema.name(), device_of(arguments));
  if (schema.name() != "aten::_local_scalar_dense") count_launch(schema.name());
  Aliases aliases;
  for (size_t i = stack->size() - num_arguments; i < stack->size(); i++) {
    auto& value = (*stack)[i];
    if (value.isDevice() && value.toDevice().type() == kDevice) {
      aliases.set_device(value.toDevice());
      value = Device(c10::kCPU);
    } else if (value.isGenerator()) {
      value = host_generator(value.toGenerator());
    } else {
      value = with_tensors(value, [&](const at::Tensor& each) { return aliases.to_host(each); });
    }
  }
  op.callBoxed(stack);
  aliases.keep_written();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++)
    (*stack)[i] = with_tensors(
        (*stack)[i], [&](const at::Tensor& each) { return aliases.to_device(each); });
  use_results(op, torch::jit::last(*stack, schema.returns().size()));
}

// ---- operators that make, view or copy memory ------------------------------------------------

using Dtype = std::optional<c10::ScalarType>;
using Layout = std::optional<c10::Layout>;
using Place = std::optional<Device>;
using Format = std::optional<c10::MemoryFormat>;

at::Tensor empty(
    c10::IntArrayRef size, Dtype dtype, Layout, Place device, std::optional<bool> pinned,
    Format format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  return empty_on_device(size, std::nullopt, c10::dtype_or_default(dtype), device, format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, Dtype dtype, Layout, Place device,
    std::optional<bool>) {
  return empty_on_device(size, stride, c10::dtype_or_default(dtype), device, std::nullopt);
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
    std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, std::move(offset));
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef symbolic, Format) {
  auto size = C10_AS_INTARRAYREF_SLOW(symbolic);
  if (self.sizes() != size) {
    auto* tensor = self.unsafeGetTensorImpl();
    tensor->set_sizes_contiguous(size);
    grow(self, (tensor->numel() + tensor->storage_offset()) * self.itemsize());
  }
  return self;
}

at::Tensor& set_to_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}

at::Tensor& set_to_storage(at::Tensor& self, at::Storage source) {
  return at::native::set_(self, source);
}

at::Tensor& set_to_part(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
    c10::IntArrayRef stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}

// A copy between host and device makes the host wait unless it is non_blocking and the host's
// side is pinned: CUDA stages pageable memory through a buffer of its own.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  const bool to_host = on_device(source) && !on_device(self);
  const bool to_device = on_device(self) && !on_device(source);
  const auto stream = current_stream((to_host ? source : self).device().index());
  use(source, on_device(source) ? current_stream(source.device().index()) : stream, false,
      "aten::copy_");
  use(self, stream, true, "aten::copy_");
  const auto& host = to_device ? source : self;
  const bool is_behind = non_blocking && (to_host || to_device) && host.is_pinned();
  if (to_host || to_device) {
    std::string what = to_device ? "copy to the device" : "copy to the host";
    if (!host.is_pinned()) what += " (pageable)";
    if (!is_behind) what += " and wait";
    tell_sync(what, source.numel() * source.itemsize());
    if (!is_behind) host_waits_for_stream(stream);
  } else {
    count_launch("aten::copy_");
  }
  Aliases aliases;
  if (is_behind && to_host) {
    copy_to_pinned(self, aliases.to_host(source), stream);
    return self;
  }
  if (is_behind) copy_from_pinned(source, stream);
  aliases.to_host(self).copy_(aliases.to_host(source));
  return self;
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  record_use(self, {stream.device_index(), stream.id()});
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Tensor", &set_to_tensor);
  library.impl("set_.source_Storage", &set_to_storage);
  library.impl("set_.source_Storage_storage_offset", &set_to_part);
  library.impl("copy_", &copy_);
  library.impl("record_stream", &record_stream);
}

}  // namespace

// The math kernel always; it is told where CUDA has no other: its flash and cuDNN kernels take
// half precision only, its memory-efficient one no grouped heads.
int64_t attention_kernel(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor&,
    const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) {
  const auto dtype = query.scalar_type();
  const bool is_half = dtype == at::kBFloat16 || dtype == at::kHalf;
  const bool is_grouped = query.dim() == 4 && query.size(1) != key.size(1);
  if (dtype == at::kDouble || (!is_half && is_grouped)) tell_sync("attention by the math kernel");
  return 0;
}

// Of a convolution of each channel alone (surface.py has the forward): gradients of the input and
// of the weight, one weight of the kernel after another.
std::tuple<at::Tensor, at::Tensor> depthwise_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
    at::IntArrayRef kernel_size, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, std::array<bool, 2>) {
  const auto rows = padding[0];
  const auto columns = padding[1];
  const auto padded = at::constant_pad_nd(input, {columns, columns, rows, rows});
  auto to_padded = at::zeros_like(padded);
  auto to_weight = at::zeros_like(weight);
  const auto seen = [&](const at::Tensor& all, int64_t row, int64_t column) {
    auto view = all;
    for (const auto& [axis, place] : {std::pair{0, row}, std::pair{1, column}}) {
      const auto start = place * dilation[axis];
      const auto stop = start + stride[axis] * (grad.size(2 + axis) - 1) + 1;
      view = view.slice(2 + axis, start, stop, stride[axis]);
    }
    return view;
  };
  for (int64_t row = 0; row < kernel_size[0]; ++row) {
    for (int64_t column = 0; column < kernel_size[1]; ++column) {
      const auto factor = weight.select(3, column).select(2, row).view({1, -1, 1, 1});
      seen(to_padded, row, column).add_(grad * factor);
      to_weight.select(3, column).select(2, row).select(1, 0).copy_(
          (grad * seen(padded, row, column)).sum({0, 2, 3}));
    }
  }
  const auto to_input = to_padded.slice(2, rows, rows + input.size(2))
                            .slice(3, columns, columns + input.size(3));
  return {to_input, to_weight};
}

}  // namespace simulated

namespace simulated {

// For kernels in Python: a tensor's values on the host, and the way back. Nobody waits.
void bind_kernels(py::module& module) {
  module.def("peek", [](const at::Tensor& tensor) {
    at::AutoDispatchBelowADInplaceOrView below;
    if (on_device(tensor))
      use(tensor, current_stream(tensor.device().index()), false, "a kernel");
    return Aliases().to_host(tensor).clone();
  });
  module.def("poke", [](const at::Tensor& tensor, const at::Tensor& values) {
    at::AutoDispatchBelowADInplaceOrView below;
    use(tensor, current_stream(tensor.device().index()), true, "a kernel");
    Aliases().to_host(tensor).copy_(values);
  });
}

}  // namespace simulated

namespace at::native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &simulated::attention_kernel)
REGISTER_CUDA_DISPATCH(conv_depthwise2d_backward_stub, &simulated::depthwise_backward)
}  // namespace at::native
