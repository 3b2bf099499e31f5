// A stand-in for an accelerator on PrivateUse1: host memory behind a device type of its own, two devices, a current
// device and stream for each thread, and every operator served by torch's CPU kernels on copies. What would wait for a
// real device (a number read, a tensor read or sent) is counted and told to an observer. See __init__.py.
#include <torch/extension.h>
#include <ATen/ATen.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/Allocator.h>
#include <atomic>
#include <cstdlib>
#include <functional>

namespace {
constexpr auto kDev = c10::DeviceType::PrivateUse1;
constexpr int kCount = 2;
std::atomic<int64_t> d2h{0}, h2d{0}, scalars{0}, allocated{0}, peak{0}, fallbacks{0};
thread_local c10::DeviceIndex current = 0;
thread_local c10::StreamId streams[kCount] = {0, 0};
py::object* observer = nullptr;

void tell(const char* what, int64_t n) {
  if (observer == nullptr) return;
  py::gil_scoped_acquire gil;
  (*observer)(what, n);
}

struct Alloc final : c10::Allocator {
  static void drop(void* p) {
    if (!p) return;
    auto* base = static_cast<int64_t*>(p) - 8;
    allocated -= base[0];
    std::free(base);
  }
  c10::DataPtr allocate(size_t n) override {
    c10::Device dev(kDev, current);
    if (n == 0) return {nullptr, nullptr, &drop, dev};
    auto* base = static_cast<int64_t*>(std::aligned_alloc(64, (n + 64 + 63) / 64 * 64));
    base[0] = (int64_t)n;
    auto now = allocated += n;
    auto old = peak.load();
    while (now > old && !peak.compare_exchange_weak(old, now)) {}
    return {base + 8, base + 8, &drop, dev};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* d, const void* s, size_t n) const override { std::memcpy(d, s, n); }
};
Alloc alloc;
REGISTER_ALLOCATOR(kDev, &alloc);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kDev;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return kDev; }
  c10::Device exchangeDevice(c10::Device d) const override { auto o = getDevice(); current = d.index(); return o; }
  c10::Device getDevice() const override { return {kDev, current}; }
  void setDevice(c10::Device d) const override { current = d.index(); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { current = d.index(); }
  c10::Stream getStream(c10::Device d) const override {
    auto i = d.index() < 0 ? current : d.index();
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDev, i), streams[i]);
  }
  c10::Stream getDefaultStream(c10::Device d) const override { return c10::Stream(c10::Stream::UNSAFE, d, 0); }
  c10::Stream getNewStream(c10::Device d, int) const override {
    static std::atomic<int64_t> next{1};
    return c10::Stream(c10::Stream::UNSAFE, d, next++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto o = getStream(s.device()); streams[s.device_index()] = s.id(); return o;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kCount; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void record(void** e, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override { if (!*e) *e = new int(0); }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void* e, const c10::DeviceIndex) const noexcept override { delete static_cast<int*>(e); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Gen final : at::CPUGeneratorImpl {
  explicit Gen(c10::DeviceIndex i) { device_ = c10::Device(kDev, i); key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1); }
};
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kCount; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex d) const override { current = d; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override { auto o = current; current = d; return o; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex i) const override {
    static std::vector<at::Generator> g{at::make_generator<Gen>(0), at::make_generator<Gen>(1)};
    return g[i < 0 ? current : i];
  }
  at::Generator getNewGenerator(c10::DeviceIndex i) const override { return at::make_generator<Gen>(i < 0 ? current : i); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  bool isPinnedPtr(const void*) const override { return true; }  // all host memory is alike here
  at::Device getDeviceFromPtr(void*) const override { return {kDev, current}; }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    auto p = alloc.allocate(n);
    std::memcpy(p.get(), s.data(), std::min(n, s.nbytes()));
    s.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(p));
    s.unsafeGetStorageImpl()->set_nbytes(n);
  }
};

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dt, std::optional<at::Layout>, std::optional<at::Device> dev, std::optional<bool>, std::optional<at::MemoryFormat> mf) {
  c10::DeviceGuard g(dev.value_or(at::Device(kDev, current)));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &alloc, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dt.value_or(at::kFloat), mf);
}
at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dt, std::optional<at::Layout>, std::optional<at::Device> dev, std::optional<bool>) {
  c10::DeviceGuard g(dev.value_or(at::Device(kDev, current)));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &alloc, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dt.value_or(at::kFloat));
}
at::Tensor host(const at::Tensor& t) {  // the same memory as a CPU tensor
  if (t.device().is_cpu()) return t;
  at::Tensor keep = t;
  if (t.numel() == 0) return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kCPU));
  return at::from_blob(t.mutable_data_ptr(), t.sizes(), t.strides(), [keep](void*) {}, t.options().device(at::kCPU).requires_grad(false));
}
at::Tensor device(const at::Tensor& t, c10::Device d) {
  c10::DeviceGuard g(d);
  auto out = at::empty_strided(t.sizes(), t.strides(), t.options().device(d));
  if (t.numel()) std::memcpy(out.mutable_data_ptr(), t.data_ptr(), 0), host(out).copy_(t);
  return out;
}
bool quiet = false;
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  bool to_host = dst.device().is_cpu() && !self.device().is_cpu(), from_host = self.device().is_cpu() && !dst.device().is_cpu();
  if (to_host && !quiet) { d2h++; tell(non_blocking ? "d2h async" : "d2h", self.nbytes()); }
  if (from_host && !quiet) { h2d++; tell(non_blocking ? "h2d async" : "h2d", self.nbytes()); }
  host(dst).copy_(host(self));
  return dst;
}
at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) { dst.resize_(self.sizes()); return copy_from(self, dst, false); }
at::Scalar local_scalar(const at::Tensor& t) { scalars++; tell("item", t.numel()); return host(t).item(); }
at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> off) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), off ? std::optional<int64_t>(off->expect_int()) : std::nullopt);
}
at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) { return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride)); }
const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> mf) {
  auto s = C10_AS_INTARRAYREF_SLOW(size);
  at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), s, std::nullopt);
  return self;
}
at::Tensor& set_st(at::Tensor& r, at::Storage src, c10::SymInt off, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) { return at::cpu::set_(r, src, off.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride)); }
at::Tensor& set_s(at::Tensor& r, at::Storage src) { int64_t n = src.nbytes() / r.itemsize(); return at::cpu::set_(r, src, 0, {n}, {1}); }
at::Tensor& set_t(at::Tensor& r, const at::Tensor& src) { return at::cpu::set_(r, src.storage(), src.storage_offset(), src.sizes(), src.strides()); }
at::Tensor& set_e(at::Tensor& r) { return r; }
void record_stream(at::Tensor&, c10::Stream) {}

// A functional operator computes on the same memory, whose strides choose the way of a matrix product, and gives copies.
bool functional(const c10::FunctionSchema& schema) {
  for (auto& a : schema.arguments()) if (a.alias_info()) return false;
  for (auto& r : schema.returns()) if (r.alias_info() || r.type()->kind() != c10::TypeKind::TensorType) return false;
  return true;
}
void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::optional<c10::Device> dev;
  auto take = [&](const at::Tensor& t) {
    if (!t.defined() || t.device().type() != kDev) return t;
    if (!dev) dev = t.device();
    return host(t);
  };
  size_t n = op.schema().arguments().size();
  for (size_t i = stack->size() - n; i < stack->size(); i++) {
    c10::IValue& v = (*stack)[i];
    if (v.isTensor()) v = take(v.toTensor());
    else if (v.isTensorList()) { c10::List<at::Tensor> l; for (at::Tensor t : v.toTensorVector()) l.push_back(take(t)); v = l; }
    else if (v.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> l;
      for (std::optional<at::Tensor> t : v.toOptionalTensorVector()) l.push_back(t ? std::optional<at::Tensor>(take(*t)) : t);
      v = l;
    } else if (v.isDevice()) { dev = v.toDevice(); v = c10::Device(at::kCPU); }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); i++) {
    c10::IValue& v = (*stack)[i];
    if (v.isTensor() && v.toTensor().defined()) v = device(v.toTensor(), dev.value_or(at::Device(kDev, current)));
  }
}
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  fallbacks++;
  bool before = quiet; quiet = true;  // copies of the emulation itself do not count
  try { functional(op.schema()) ? on_host(op, stack) : at::native::cpu_fallback(op, stack); } catch (...) { quiet = before; throw; }
  quiet = before;
}
at::Tensor conv(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b, c10::SymIntArrayRef s, c10::SymIntArrayRef p, c10::SymIntArrayRef d, bool t, c10::SymIntArrayRef o, c10::SymInt g) {
  auto y = at::convolution(host(x), host(w), b && b->defined() ? std::optional<at::Tensor>(host(*b)) : std::nullopt, C10_AS_INTARRAYREF_SLOW(s), C10_AS_INTARRAYREF_SLOW(p), C10_AS_INTARRAYREF_SLOW(d), t, C10_AS_INTARRAYREF_SLOW(o), g.expect_int());
  return device(y, x.device());
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> conv_bwd(const at::Tensor& go, const at::Tensor& x, const at::Tensor& w, c10::SymIntArrayRef s, c10::SymIntArrayRef p, c10::SymIntArrayRef d, bool t, c10::SymIntArrayRef o, c10::SymInt g, std::array<bool, 3> m) {
  std::optional<at::IntArrayRef> bs; std::vector<int64_t> bv{w.size(t ? 1 : 0)}; if (m[2]) bs = bv;
  auto [a, b, c] = at::convolution_backward(host(go), host(x), host(w), bs, C10_AS_INTARRAYREF_SLOW(s), C10_AS_INTARRAYREF_SLOW(p), C10_AS_INTARRAYREF_SLOW(d), t, C10_AS_INTARRAYREF_SLOW(o), g.expect_int(), m);
  auto dev = x.device();
  return {m[0] ? device(a, dev) : at::Tensor(), m[1] ? device(b, dev) : at::Tensor(), m[2] ? device(c, dev) : at::Tensor()};
}
}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_st);
  m.impl("set_.source_Storage", set_s);
  m.impl("set_.source_Tensor", set_t);
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", conv);
  m.impl("convolution_backward_overrideable", conv_bwd);
  // Elsewhere torch composes these of other operators, in other roundings; a GPU has kernels of its own, as the CPU has.
  for (auto name : {"native_layer_norm", "native_group_norm", "mish_backward", "silu_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("counts", [] { return std::map<std::string, int64_t>{{"d2h", d2h}, {"h2d", h2d}, {"item", scalars}, {"allocated", allocated}, {"peak", peak}, {"fallbacks", fallbacks}}; });
  m.def("reset", [] { d2h = h2d = scalars = fallbacks = 0; peak = allocated.load(); });
  m.def("observe", [](py::object f) { observer = f.is_none() ? nullptr : new py::object(f); });
  m.def("current_device", [] { return (int)current; });
  m.def("set_device", [](int d) { current = d; });
  m.def("current_stream", [](int d) { return streams[d]; });
  m.def("set_stream", [](int d, int64_t s) { streams[d] = s; });
  m.def("storage_use_count", [](const at::Tensor& t) { return t.storage().use_count(); });
}
