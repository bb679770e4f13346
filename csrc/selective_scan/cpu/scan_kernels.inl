// The selective scan on a CPU, vectorised over channels (one vector lane each), for one instruction set.
//
//   h_t = a_t h_{t-1} + Δ_t u_t B_t,   a_t = exp(Δ_t A),   y_t = κ Re Σ_n C_t h_t + D u_t,   out = y silu(z)
// with κ = 1 for real and 2 for complex A. Backward, with dh_t the gradient that reaches h_t and ḡ the conjugate:
//   dh_t = κ dy_t C̄_t + g_{t+1},   g_t = dh_t ā_t,   dB_t = dh_t Δ_t u_t,   dC_t = κ dy_t h̄_t,
//   w_t = g_t h̄_{t-1},   dA = Σ_t Δ_t w_t,   d(Δ_t u_t) = Re Σ_n dh_t B̄_t,   dΔ_t = u_t d(Δ_t u_t) + Re Σ_n w_t Ā.
//
// Only compiler vector types and builtins, all in an unnamed namespace: nothing compiled here for a wide instruction
// set can be linked into code that runs elsewhere.
#include "scan_kernels.h"

namespace mamba_ssm::cpu::SCAN_NAMESPACE {
namespace {

template <typename R>
struct VectorOf;
template <>
struct VectorOf<float> {
  typedef float V __attribute__((vector_size(SCAN_VECTOR_BYTES), may_alias));
  typedef int32_t I __attribute__((vector_size(SCAN_VECTOR_BYTES), may_alias));
};
template <>
struct VectorOf<double> {
  typedef double V __attribute__((vector_size(SCAN_VECTOR_BYTES), may_alias));
  typedef int64_t I __attribute__((vector_size(SCAN_VECTOR_BYTES), may_alias));
};
template <typename R>
using Vec = typename VectorOf<R>::V;
template <typename R>
using IntVec = typename VectorOf<R>::I;
template <typename R>
constexpr int64_t kLanes = SCAN_VECTOR_BYTES / sizeof(R);

// Gradients and states for different channels in the lanes; complex numbers as two vectors.
template <typename X>
struct Pair {
  X re, im;
};
template <typename X>
inline Pair<X> operator+(Pair<X> a, Pair<X> b) { return {a.re + b.re, a.im + b.im}; }
template <typename X, typename Y>
inline Pair<X> times(Pair<X> a, Pair<Y> b) { return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re}; }
template <typename X, typename Y>
inline Pair<X> times_conj(Pair<X> a, Pair<Y> b) { return {a.re * b.re + a.im * b.im, a.im * b.re - a.re * b.im}; }
template <typename X, typename Y>
inline Pair<X> scale(X factor, Pair<Y> b) { return {factor * b.re, factor * b.im}; }
template <typename X, typename Y>
inline Pair<X> scale_conj(X factor, Pair<Y> b) { return {factor * b.re, -(factor * b.im)}; }
template <typename X, typename Y>
inline X real_of_times(Pair<X> a, Pair<Y> b) { return a.re * b.re - a.im * b.im; }
template <typename X, typename Y>
inline X real_of_times_conj(Pair<X> a, Pair<Y> b) { return a.re * b.re + a.im * b.im; }

template <typename X, typename Y>
inline X times(X a, Y b) { return a * b; }
template <typename X, typename Y>
inline X times_conj(X a, Y b) { return a * b; }
template <typename X, typename Y>
inline X scale(X factor, Y b) { return factor * b; }
template <typename X, typename Y>
inline X scale_conj(X factor, Y b) { return factor * b; }
template <typename X, typename Y>
inline X real_of_times(X a, Y b) { return a * b; }
template <typename X, typename Y>
inline X real_of_times_conj(X a, Y b) { return a * b; }

template <typename R, bool Complex>
struct StateOf {
  using Scalar = R;
  using Vector = Vec<R>;
  static constexpr R kappa = 1;
};
template <typename R>
struct StateOf<R, true> {
  using Scalar = Pair<R>;
  using Vector = Pair<Vec<R>>;
  static constexpr R kappa = 2;
};

template <typename To, typename From>
inline To bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  __builtin_memcpy(&y, &x, sizeof(y));
  return y;
}

constexpr double kLn2 = 0.693147180559945309417;
constexpr double kLog2e = 1.442695040888963407360;

template <typename V, typename R>
inline V broadcast(R x) { return V{} + x; }

// 2^x: x = i + f with |f| <= 1/2, a Chebyshev fit of 2^f (error 2e-9 and 3e-18), times 2^i. Results below the smallest
// normal number are zero, results above the largest infinite; NaN stays NaN.
inline Vec<float> exp2_vector(Vec<float> exponent) {
  using V = Vec<float>;
  V x = exponent < -126.0f ? broadcast<V>(-126.0f) : exponent;
  x = x > 127.4f ? broadcast<V>(127.4f) : x;
  const V shifted = x + 12582912.0f;  // 1.5 * 2^23: rounds to an integer, which its low mantissa bits then hold
  const V f = x - (shifted - 12582912.0f);
  V p = f * 0.000154614447f + 0.00134004282f;
  p = p * f + 0.00961805668f;
  p = p * f + 0.0555032723f;
  p = p * f + 0.240226509f;
  p = p * f + 0.693147207f;
  p = p * f + 1.0f;
  const V result = p * bits<V>((bits<IntVec<float>>(shifted) + 127) << 23);
  const V high = exponent > 127.4f ? broadcast<V>(__builtin_inff()) : result;
  return exponent < -126.0f ? V{} : high;
}
inline Vec<double> exp2_vector(Vec<double> exponent) {
  using V = Vec<double>;
  V x = exponent < -1022.0 ? broadcast<V>(-1022.0) : exponent;
  x = x > 1023.4 ? broadcast<V>(1023.4) : x;
  const V shifted = x + 6755399441055744.0;  // 1.5 * 2^52
  const V f = x - (shifted - 6755399441055744.0);
  V p = f * 4.455817908336064493e-10 + 7.0741942972885210056e-9;
  p = p * f + 1.0178057087733941105e-7;
  p = p * f + 1.3215432535912376166e-6;
  p = p * f + 0.000015252733841556772589;
  p = p * f + 0.00015403530463724354209;
  p = p * f + 0.0013333558146406470697;
  p = p * f + 0.0096181291075872566681;
  p = p * f + 0.055504108664821627039;
  p = p * f + 0.24022650695910159567;
  p = p * f + 0.69314718055994530925;
  p = p * f + 1.0;
  const V result = p * bits<V>((bits<IntVec<double>>(shifted) + 1023) << 52);
  const V high = exponent > 1023.4 ? broadcast<V>(__builtin_inf()) : result;
  return exponent < -1022.0 ? V{} : high;
}

// exp(Δ A) from A log2(e).
template <typename R>
inline Vec<R> decay_of(Vec<R> delta, Vec<R> A_log2e) { return exp2_vector(delta * A_log2e); }
template <typename R>
inline Pair<Vec<R>> decay_of(Vec<R> delta, Pair<Vec<R>> A_log2e) {
  const Vec<R> size = exp2_vector(delta * A_log2e.re), angle = delta * A_log2e.im * R(kLn2);
  Vec<R> sine{}, cosine{};
  for (int64_t lane = 0; lane < kLanes<R>; ++lane) {
    sine[lane] = R(__builtin_sin(double(angle[lane])));
    cosine[lane] = R(__builtin_cos(double(angle[lane])));
  }
  return {size * cosine, size * sine};
}

template <typename R>
inline Vec<R> exp_vector(Vec<R> x) { return exp2_vector(x * R(kLog2e)); }

// log(1 + e), e >= 0: 1 + e = 2^k m with m near 1, log m = 2 atanh(s) by its series in s = (m-1)/(m+1); what rounding
// 1 + e lost is put back by the factor e / ((1+e) - 1).
template <typename R>
inline Vec<R> log1p_vector(Vec<R> e) {
  using V = Vec<R>;
  using I = IntVec<R>;
  constexpr int mantissa_bits = sizeof(R) == 4 ? 23 : 52;
  constexpr int bias = sizeof(R) == 4 ? 127 : 1023;
  constexpr int terms = sizeof(R) == 4 ? 6 : 12;
  const V w = R(1) + e;
  I k = (bits<I>(w) >> mantissa_bits) - bias;
  V m = bits<V>(bits<I>(w) - (k << mantissa_bits));  // [1, 2)
  const I above = m > R(1.4142135623730951);
  m = above ? m * R(0.5) : m;
  k = k - above;  // true lanes are -1
  const V s = (m - R(1)) / (m + R(1)), s2 = s * s;
  V series = broadcast<V>(R(1) / R(2 * terms + 1));
  for (int j = terms - 1; j >= 0; --j) series = series * s2 + R(1) / R(2 * j + 1);
  const V log_w = __builtin_convertvector(k, V) * R(kLn2) + R(2) * s * series;
  const V lost = w - R(1);
  return lost == R(0) ? e : log_w * (e / (lost == R(0) ? broadcast<V>(R(1)) : lost));
}

template <typename R>
inline Vec<R> softplus_vector(Vec<R> x) {
  const Vec<R> inner = log1p_vector<R>(exp_vector<R>(x > R(20) ? broadcast<Vec<R>>(R(20)) : x));
  return x > R(20) ? x : inner;
}
template <typename R>
inline Vec<R> sigmoid_vector(Vec<R> x) { return R(1) / (R(1) + exp_vector<R>(-x)); }

// 16-bit storage formats, converted here so that no torch header is needed.
struct BFloat16 {
  uint16_t raw;
};
struct Float16 {
  uint16_t raw;
};
inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
inline float widen(BFloat16 x) { return bits<float>(uint32_t(x.raw) << 16); }
inline float widen(Float16 x) {
  const uint32_t sign = uint32_t(x.raw & 0x8000u) << 16, rest = x.raw & 0x7fffu;
  if (rest >= 0x7c00u) return bits<float>(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
  if (rest >= 0x0400u) return bits<float>(sign | ((rest << 13) + (112u << 23)));
  const float tiny = float(rest) * 5.9604644775390625e-8f;  // subnormal: rest * 2^-24
  return sign ? -tiny : tiny;
}
inline void narrow(float x, float& y) { y = x; }
inline void narrow(double x, double& y) { y = x; }
inline void narrow(float x, BFloat16& y) {
  const uint32_t raw = bits<uint32_t>(x);
  y.raw = x != x ? 0x7fc0u : uint16_t((raw + 0x7fffu + ((raw >> 16) & 1u)) >> 16);  // to nearest even
}
inline void narrow(float x, Float16& y) {
  const uint32_t raw = bits<uint32_t>(x), sign = (raw >> 16) & 0x8000u, size = raw & 0x7fffffffu;
  uint32_t half;
  if (size > 0x7f800000u) {
    half = 0x7e00u;
  } else if (size >= 0x477ff000u) {  // 65520 and above round to infinity
    half = 0x7c00u;
  } else if (size < 0x38800000u) {  // below 2^-14: adding 1/2 leaves the rounded subnormal in the low bits
    half = bits<uint32_t>(bits<float>(size) + 0.5f) - 0x3f000000u;
  } else {
    half = (size - (112u << 23) + 0xfffu + ((size >> 13) & 1u)) >> 13;
  }
  y.raw = uint16_t(sign | half);
}

// Channels [first, first + count) of one batch item, count <= lanes.
struct Block {
  int64_t batch, first, count;
};

template <typename T, typename R>
void load_tile(const Activation& from, Block block, int64_t row, int64_t rows, Vec<R>* tile) {
  R* flat = reinterpret_cast<R*>(tile);
  if (block.count < kLanes<R>) {
    for (int64_t t = 0; t < rows; ++t) tile[t] = Vec<R>{};
  }
  for (int64_t lane = 0; lane < block.count; ++lane) {
    const T* source = static_cast<const T*>(from.data) + block.batch * from.batch_stride +
                      (block.first + lane) * from.channel_stride + row * from.row_stride;
    for (int64_t t = 0; t < rows; ++t) flat[t * kLanes<R> + lane] = R(widen(source[t * from.row_stride]));
  }
}

template <typename T, typename R>
void store_tile(const MutableActivation& to, Block block, int64_t row, int64_t rows, const Vec<R>* tile) {
  const R* flat = reinterpret_cast<const R*>(tile);
  for (int64_t lane = 0; lane < block.count; ++lane) {
    T* target = static_cast<T*>(to.data) + block.batch * to.batch_stride + (block.first + lane) * to.channel_stride +
                row * to.row_stride;
    for (int64_t t = 0; t < rows; ++t) narrow(flat[t * kLanes<R> + lane], target[t * to.row_stride]);
  }
}

// (D) parameters and (D, N) states: lanes are channels, lanes past `count` are zero.
template <typename R>
Vec<R> load_parameter(const void* from, Block block) {
  Vec<R> lanes{};
  if (from != nullptr) {
    for (int64_t lane = 0; lane < block.count; ++lane) lanes[lane] = static_cast<const R*>(from)[block.first + lane];
  }
  return lanes;
}
inline void set_lane(Vec<float>& x, int64_t lane, float value) { x[lane] = value; }
inline void set_lane(Vec<double>& x, int64_t lane, double value) { x[lane] = value; }
template <typename R>
inline void set_lane(Pair<Vec<R>>& x, int64_t lane, Pair<R> value) {
  x.re[lane] = value.re;
  x.im[lane] = value.im;
}
inline float get_lane(const Vec<float>& x, int64_t lane) { return x[lane]; }
inline double get_lane(const Vec<double>& x, int64_t lane) { return x[lane]; }
template <typename V>
inline auto get_lane(const Pair<V>& x, int64_t lane) { return Pair<decltype(get_lane(x.re, lane))>{get_lane(x.re, lane), get_lane(x.im, lane)}; }

template <typename S, typename SV>
void load_state(const void* from, int64_t index, Block block, int64_t N, SV* state) {
  for (int64_t n = 0; n < N; ++n) state[n] = SV{};
  if (from == nullptr) return;
  for (int64_t lane = 0; lane < block.count; ++lane) {
    const S* source = static_cast<const S*>(from) + (index + block.first + lane) * N;
    for (int64_t n = 0; n < N; ++n) set_lane(state[n], lane, source[n]);
  }
}
template <typename S, typename SV>
void store_state(void* to, int64_t index, Block block, int64_t N, const SV* state) {
  if (to == nullptr) return;
  for (int64_t lane = 0; lane < block.count; ++lane) {
    S* target = static_cast<S*>(to) + (index + block.first + lane) * N;
    for (int64_t n = 0; n < N; ++n) target[n] = get_lane(state[n], lane);
  }
}

template <typename R, int64_t lanes>
struct Sum {
  typedef R V __attribute__((vector_size(lanes * sizeof(R)), may_alias));
  static inline R of(V x) {
    typename Sum<R, lanes / 2>::V halves[2];
    __builtin_memcpy(halves, &x, sizeof(x));
    return Sum<R, lanes / 2>::of(halves[0] + halves[1]);
  }
};
template <>
struct Sum<float, 4> {
  typedef float V __attribute__((vector_size(16), may_alias));
  static inline float of(V x) { return (x[0] + x[2]) + (x[1] + x[3]); }
};
template <>
struct Sum<double, 2> {
  typedef double V __attribute__((vector_size(16), may_alias));
  static inline double of(V x) { return x[0] + x[1]; }
};
// Halves onto halves: lane after lane, each addition would wait for the one before.
inline float sum_lanes(Vec<float> x) { return Sum<float, kLanes<float>>::of(x); }
inline double sum_lanes(Vec<double> x) { return Sum<double, kLanes<double>>::of(x); }
template <typename V>
inline auto sum_lanes(Pair<V> x) { return Pair<decltype(sum_lanes(x.re))>{sum_lanes(x.re), sum_lanes(x.im)}; }

template <typename X>
inline void scale_in_place(X& x, double factor) { x = x * decltype(x[0] + x[0])(factor); }
template <typename V>
inline void scale_in_place(Pair<V>& x, double factor) {
  scale_in_place(x.re, factor);
  scale_in_place(x.im, factor);
}

// Hands out aligned pieces of the caller's scratch; with base == nullptr it only counts.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}
  template <typename X>
  X* take(int64_t count) {
    X* piece = reinterpret_cast<X*>(base_ + used_);
    used_ += (size_t(count) * sizeof(X) + 63) / 64 * 64;
    return piece;
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

// T: storage of activations, R: arithmetic, Complex: whether states are complex.
template <typename T, typename R, bool Complex>
struct Scan {
  using V = Vec<R>;
  using S = typename StateOf<R, Complex>::Scalar;
  using SV = typename StateOf<R, Complex>::Vector;
  static constexpr R kappa = StateOf<R, Complex>::kappa;
  static constexpr int64_t lanes = kLanes<R>;
  static constexpr int64_t blocks_of_part = (kPartChannels + lanes - 1) / lanes;

  struct Scratch {
    V *delta, *raw_delta, *u, *drive, *y, *dout, *z, *ddelta;  // (Q) each
    SV *A, *constant_B, *constant_C, *h;                       // (N) each
    SV *decay, *before;                                        // (Q, N), (Q + 1, N)
    SV *dB, *dC;                                               // (Q, N): summed over the blocks of a part
    SV *dh, *dA, *dB_constant, *dC_constant;                   // (blocks, N)
    V *dD, *ddelta_bias;                                       // (blocks)
    size_t bytes;

    Scratch(void* base, int64_t N) {
      Arena arena(base);
      for (V** tile : {&delta, &raw_delta, &u, &drive, &y, &dout, &z, &ddelta}) *tile = arena.take<V>(kChunk);
      for (SV** row : {&A, &constant_B, &constant_C, &h}) *row = arena.take<SV>(N);
      decay = arena.take<SV>(kChunk * N);
      before = arena.take<SV>((kChunk + 1) * N);
      for (SV** rows : {&dB, &dC}) *rows = arena.take<SV>(kChunk * N);
      for (SV** rows : {&dh, &dA, &dB_constant, &dC_constant}) *rows = arena.take<SV>(blocks_of_part * N);
      for (V** row : {&dD, &ddelta_bias}) *row = arena.take<V>(blocks_of_part);
      bytes = arena.used();
    }
  };

  static size_t scratch_bytes(const ScanArguments& p) { return Scratch(nullptr, p.state).bytes; }

  // Channels of a part, its index among all parts of the batch item, and where its rows of B and C start.
  struct Part {
    int64_t batch, index, first, count;
    const S *B, *C;  // (L, N) of the part's group; nullptr where constant
  };

  static Part part_of(const ScanArguments& p, int64_t item) {
    Part part;
    part.batch = item / p.parts();
    part.index = item % p.parts();
    const int64_t segment = part.index / p.parts_of_segment(), offset = part.index % p.parts_of_segment() * kPartChannels;
    part.first = segment * p.segment_channels + offset;
    part.count = p.segment_channels - offset < kPartChannels ? p.segment_channels - offset : kPartChannels;
    part.B = group_rows(p, p.B, p.groups_B, part);
    part.C = group_rows(p, p.C, p.groups_C, part);
    return part;
  }

  static const S* group_rows(const ScanArguments& p, const void* from, int64_t groups, const Part& part) {
    if (groups == 0) return nullptr;
    const int64_t group = part.first / (p.channels / groups);
    return static_cast<const S*>(from) + (part.batch * groups + group) * p.length * p.state;
  }

  static Block block_of(const Part& part, int64_t b) {
    const int64_t left = part.count - b * lanes;
    return {part.batch, part.first + b * lanes, left < lanes ? left : lanes};
  }
  static int64_t blocks_in(const Part& part) { return (part.count + lanes - 1) / lanes; }

  static void load_parameters(const ScanArguments& p, Block block, Scratch& s) {
    load_state<S>(p.A, 0, block, p.state, s.A);
    for (int64_t n = 0; n < p.state; ++n) scale_in_place(s.A[n], kLog2e);
    if (p.groups_B == 0) load_state<S>(p.B, 0, block, p.state, s.constant_B);
    if (p.groups_C == 0) load_state<S>(p.C, 0, block, p.state, s.constant_C);
  }

  // u, Δ and Δu of a chunk; raw_delta is what softplus was applied to.
  static void load_inputs(const ScanArguments& p, Block block, V bias, int64_t row, int64_t rows, Scratch& s) {
    load_tile<T, R>(p.u, block, row, rows, s.u);
    load_tile<T, R>(p.delta, block, row, rows, s.raw_delta);
    for (int64_t t = 0; t < rows; ++t) {
      s.raw_delta[t] = s.raw_delta[t] + bias;
      s.delta[t] = p.delta_softplus ? softplus_vector<R>(s.raw_delta[t]) : s.raw_delta[t];
      s.drive[t] = s.delta[t] * s.u[t];
    }
  }

  static bool starts_at(const ScanArguments& p, int64_t batch, int64_t row) {
    return p.starts != nullptr && p.starts[batch * p.length + row] != 0;
  }

  template <bool VariableB, bool VariableC>
  static void scan_rows(const ScanArguments& p, const Part& part, int64_t row, int64_t rows, Scratch& s) {
    const int64_t N = p.state;
    for (int64_t t = 0; t < rows; ++t) {
      const V delta = s.delta[t], drive = s.drive[t];
      const S* B = VariableB ? part.B + (row + t) * N : nullptr;
      const S* C = VariableC ? part.C + (row + t) * N : nullptr;
      if (starts_at(p, part.batch, row + t)) {
        for (int64_t n = 0; n < N; ++n) s.h[n] = SV{};
      }
      V y{};
      for (int64_t n = 0; n < N; ++n) {
        SV driven, h = times(decay_of<R>(delta, s.A[n]), s.h[n]);
        if constexpr (VariableB) driven = scale(drive, B[n]);
        else driven = scale(drive, s.constant_B[n]);
        h = h + driven;
        s.h[n] = h;
        if constexpr (VariableC) y = y + real_of_times(h, C[n]);
        else y = y + real_of_times(h, s.constant_C[n]);
      }
      s.y[t] = y * kappa;
    }
  }

  static void forward_block(const ScanArguments& p, const Part& part, Block block, Scratch& s) {
    const int64_t N = p.state;
    const V bias = load_parameter<R>(p.delta_bias, block), skip = load_parameter<R>(p.D, block);
    load_parameters(p, block, s);
    load_state<S>(p.initial, part.batch * p.channels, block, N, s.h);
    for (int64_t chunk = 0; chunk < p.chunks(); ++chunk) {
      const int64_t row = chunk * kChunk, rows = p.length - row < kChunk ? p.length - row : kChunk;
      store_state<S>(p.states, (part.batch * p.chunks() + chunk) * p.channels, block, N, s.h);
      load_inputs(p, block, bias, row, rows, s);
      if (part.B && part.C) scan_rows<true, true>(p, part, row, rows, s);
      else if (part.B) scan_rows<true, false>(p, part, row, rows, s);
      else if (part.C) scan_rows<false, true>(p, part, row, rows, s);
      else scan_rows<false, false>(p, part, row, rows, s);
      if (p.D) {
        for (int64_t t = 0; t < rows; ++t) s.y[t] = s.y[t] + skip * s.u[t];
      }
      if (p.z.data) {
        load_tile<T, R>(p.z, block, row, rows, s.z);
        for (int64_t t = 0; t < rows; ++t) s.y[t] = s.y[t] * s.z[t] * sigmoid_vector<R>(s.z[t]);
      }
      store_tile<T, R>(p.out, block, row, rows, s.y);
    }
    store_state<S>(p.last_state, part.batch * p.channels, block, N, s.h);
  }

  static void forward(const ScanArguments& p, int64_t begin, int64_t end, void* scratch) {
    Scratch s(scratch, p.state);
    for (int64_t item = begin; item < end; ++item) {
      const Part part = part_of(p, item);
      for (int64_t b = 0; b < blocks_in(part); ++b) forward_block(p, part, block_of(part, b), s);
    }
  }

  // The states of a chunk again: before[t] entered row t, decay[t] = a_t; y without D u.
  static void recompute_rows(const ScanArguments& p, const Part& part, int64_t row, int64_t rows, Scratch& s) {
    const int64_t N = p.state;
    for (int64_t t = 0; t < rows; ++t) {
      const V delta = s.delta[t], drive = s.drive[t];
      SV *before = s.before + t * N, *after = before + N, *decay = s.decay + t * N;
      const bool start = starts_at(p, part.batch, row + t);
      const S* B = part.B ? part.B + (row + t) * N : nullptr;
      for (int64_t n = 0; n < N; ++n) {
        const SV a = start ? SV{} : decay_of<R>(delta, s.A[n]);
        decay[n] = a;
        after[n] = times(a, before[n]) + (B ? scale(drive, B[n]) : scale(drive, s.constant_B[n]));
      }
      if (!p.z.data) continue;
      const S* C = part.C ? part.C + (row + t) * N : nullptr;
      V y{};
      for (int64_t n = 0; n < N; ++n) y = y + (C ? real_of_times(after[n], C[n]) : real_of_times(after[n], s.constant_C[n]));
      s.y[t] = y * kappa;
    }
  }

  // From the last row of a chunk to its first. s.dout holds dy; s.drive becomes d(Δu), s.ddelta the part of dΔ through a.
  template <bool VariableB, bool VariableC>
  static void backward_rows(const Part& part, int64_t N, int64_t row, int64_t rows, int64_t b, Scratch& s) {
    SV *dh = s.dh + b * N, *dA = s.dA + b * N;
    SV *dB_constant = s.dB_constant + b * N, *dC_constant = s.dC_constant + b * N;
    for (int64_t t = rows - 1; t >= 0; --t) {
      const V delta = s.delta[t], drive = s.drive[t], dy = s.dout[t] * kappa;
      const SV *before = s.before + t * N, *after = before + N, *decay = s.decay + t * N;
      const S* B = VariableB ? part.B + (row + t) * N : nullptr;
      const S* C = VariableC ? part.C + (row + t) * N : nullptr;
      SV *dB = VariableB ? s.dB + t * N : dB_constant, *dC = VariableC ? s.dC + t * N : dC_constant;
      V ddrive{}, ddecay{};
      for (int64_t n = 0; n < N; ++n) {
        SV d;
        if constexpr (VariableC) d = dh[n] + scale_conj(dy, C[n]);
        else d = dh[n] + scale_conj(dy, s.constant_C[n]);
        dC[n] = dC[n] + scale_conj(dy, after[n]);
        dB[n] = dB[n] + scale(drive, d);
        if constexpr (VariableB) ddrive = ddrive + real_of_times_conj(d, B[n]);
        else ddrive = ddrive + real_of_times_conj(d, s.constant_B[n]);
        const SV g = times_conj(d, decay[n]), w = times_conj(g, before[n]);
        dA[n] = dA[n] + scale(delta, w);
        ddecay = ddecay + real_of_times_conj(w, s.A[n]);
        dh[n] = g;
      }
      s.drive[t] = ddrive;
      s.ddelta[t] = ddecay * R(kLn2);
    }
  }

  static void backward_block(const ScanArguments& p, const Part& part, int64_t chunk, int64_t b, Scratch& s) {
    const int64_t N = p.state, row = chunk * kChunk, rows = p.length - row < kChunk ? p.length - row : kChunk;
    const Block block = block_of(part, b);
    const V bias = load_parameter<R>(p.delta_bias, block), skip = load_parameter<R>(p.D, block);
    load_parameters(p, block, s);
    load_inputs(p, block, bias, row, rows, s);
    load_state<S>(p.states, (part.batch * p.chunks() + chunk) * p.channels, block, N, s.before);
    recompute_rows(p, part, row, rows, s);
    load_tile<T, R>(p.dout, block, row, rows, s.dout);
    if (p.z.data) gate_backward(p, block, skip, row, rows, s);
    if (part.B && part.C) backward_rows<true, true>(part, N, row, rows, b, s);
    else if (part.B) backward_rows<true, false>(part, N, row, rows, b, s);
    else if (part.C) backward_rows<false, true>(part, N, row, rows, b, s);
    else backward_rows<false, false>(part, N, row, rows, b, s);
    for (int64_t t = 0; t < rows; ++t) {
      const V ddrive = s.drive[t], u = s.u[t];
      V ddelta = u * ddrive + s.ddelta[t];
      if (p.delta_softplus) {
        ddelta = s.raw_delta[t] > R(20) ? ddelta : ddelta * sigmoid_vector<R>(s.raw_delta[t]);
      }
      s.ddelta[t] = ddelta;
      s.ddelta_bias[b] = s.ddelta_bias[b] + ddelta;
      s.dD[b] = s.dD[b] + s.dout[t] * u;
      s.u[t] = s.delta[t] * ddrive + skip * s.dout[t];
    }
    store_tile<T, R>(p.du, block, row, rows, s.u);
    store_tile<T, R>(p.ddelta, block, row, rows, s.ddelta);
  }

  // out = y silu(z): dz from dout, then dout becomes dy.
  static void gate_backward(const ScanArguments& p, Block block, V skip, int64_t row, int64_t rows, Scratch& s) {
    load_tile<T, R>(p.z, block, row, rows, s.z);
    for (int64_t t = 0; t < rows; ++t) {
      const V z = s.z[t], gate = sigmoid_vector<R>(z), y = s.y[t] + skip * s.u[t], dout = s.dout[t];
      s.z[t] = dout * y * gate * (R(1) + z * (R(1) - gate));
      s.dout[t] = dout * z * gate;
    }
    store_tile<T, R>(p.dz, block, row, rows, s.z);
  }

  static void backward_part(const ScanArguments& p, const Part& part, Scratch& s) {
    const int64_t N = p.state, blocks = blocks_in(part), channels = part.batch * p.channels;
    for (int64_t b = 0; b < blocks; ++b) {
      load_state<S>(p.dlast_state, channels, block_of(part, b), N, s.dh + b * N);
      s.dD[b] = s.ddelta_bias[b] = V{};
      for (SV* sums : {s.dA, s.dB_constant, s.dC_constant}) {
        for (int64_t n = 0; n < N; ++n) sums[b * N + n] = SV{};
      }
    }
    for (int64_t chunk = p.chunks() - 1; chunk >= 0; --chunk) {
      const int64_t row = chunk * kChunk, rows = p.length - row < kChunk ? p.length - row : kChunk;
      for (int64_t i = 0; i < rows * N; ++i) s.dB[i] = s.dC[i] = SV{};
      for (int64_t b = 0; b < blocks; ++b) backward_block(p, part, chunk, b, s);
      const int64_t target = ((part.batch * p.parts() + part.index) * p.length + row) * N;
      for (int64_t i = 0; i < rows * N; ++i) {
        if (part.B) static_cast<S*>(p.dB)[target + i] = sum_lanes(s.dB[i]);
        if (part.C) static_cast<S*>(p.dC)[target + i] = sum_lanes(s.dC[i]);
      }
    }
    for (int64_t b = 0; b < blocks; ++b) {
      const Block block = block_of(part, b);
      store_state<S>(p.dinitial, channels, block, N, s.dh + b * N);
      store_state<S>(p.dA, channels, block, N, s.dA + b * N);
      if (!part.B) store_state<S>(p.dB, channels, block, N, s.dB_constant + b * N);
      if (!part.C) store_state<S>(p.dC, channels, block, N, s.dC_constant + b * N);
      store_state<R>(p.dD, channels, block, 1, s.dD + b);
      store_state<R>(p.ddelta_bias, channels, block, 1, s.ddelta_bias + b);
    }
  }

  static void backward(const ScanArguments& p, int64_t begin, int64_t end, void* scratch) {
    Scratch s(scratch, p.state);
    for (int64_t item = begin; item < end; ++item) backward_part(p, part_of(p, item), s);
  }

  static Kernels kernels() { return {scratch_bytes, forward, backward}; }
};

template <typename V, typename R>
inline V load_lanes(const R* from, int64_t count) {
  V x{};
  if (count == kLanes<R>) __builtin_memcpy(&x, from, sizeof(V));
  else __builtin_memcpy(&x, from, count * sizeof(R));
  return x;
}

// One step of one channel, vectorised over the state: h <- exp(Δ A) h + Δ x B; gives Σ C h.
template <typename R>
__attribute__((always_inline)) inline R step_channel(const StepArguments& p, R* h, const R* A, const R* B, const R* C,
                                                     R delta, R drive) {
  using V = Vec<R>;
  const bool one_decay = p.A_state_stride == 0;
  const V shared = one_decay ? exp2_vector(broadcast<V>(delta * A[0] * R(kLog2e))) : V{};
  V total{};
  const auto advance = [&](int64_t n, int64_t count) __attribute__((always_inline)) {
    const V decay = one_decay ? shared : exp2_vector(load_lanes<V>(A + n, count) * (delta * R(kLog2e)));
    const V state = decay * load_lanes<V>(h + n, count) + drive * load_lanes<V>(B + n, count);
    total = total + state * load_lanes<V>(C + n, count);
    __builtin_memcpy(h + n, &state, count * sizeof(R));
  };
  int64_t n = 0;
  for (; n + kLanes<R> <= p.state; n += kLanes<R>) advance(n, kLanes<R>);  // a constant: whole vectors, no copies
  if (n < p.state) advance(n, p.state - n);
  return sum_lanes(total);
}

template <typename R>
void step(const StepArguments& p, int64_t begin, int64_t end) {
  using V = Vec<R>;
  constexpr int64_t lanes = kLanes<R>;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t b = item / p.heads, head = item % p.heads, row = p.rows ? p.rows[b] : b;
    const auto at = [&](const Strided& x, int64_t channel) {
      return static_cast<const R*>(x.data) + b * x.batch_stride + head * x.head_stride + channel * x.channel_stride;
    };
    const auto channels = [&](const Strided& x, int64_t first, int64_t count) {  // zeros where x is not given
      V values{};
      if (x.data == nullptr) return values;
      if (x.channel_stride == 1) return load_lanes<V>(at(x, first), count);
      for (int64_t i = 0; i < count; ++i) values[i] = *at(x, first + i);
      return values;
    };
    const auto projected = [&](const Strided& x, int64_t groups) {
      return static_cast<const R*>(x.data) + b * x.batch_stride + head / (p.heads / groups) * x.head_stride;
    };
    const R *B = projected(p.B, p.groups_B), *C = projected(p.C, p.groups_C);
    R* h = static_cast<R*>(p.h) + row * p.h_row_stride + head * p.h_head_stride;
    R* out = static_cast<R*>(p.out) + (b * p.heads + head) * p.head_channels;
    for (int64_t first = 0; first < p.head_channels; first += lanes) {
      const int64_t count = p.head_channels - first < lanes ? p.head_channels - first : lanes;
      const V x = channels(p.x, first, count);
      V delta = channels(p.dt, first, count) + channels(p.dt_bias, first, count);
      if (p.dt_softplus) delta = softplus_vector<R>(delta);
      const V drive = delta * x;
      V y{};
      for (int64_t i = 0; i < count; ++i) {
        const int64_t channel = first + i;
        y[i] = step_channel<R>(p, h + channel * p.h_channel_stride, at(p.A, channel), B, C, delta[i], drive[i]);
      }
      if (p.D.data) y = y + channels(p.D, first, count) * x;
      if (p.z.data) {
        const V z = channels(p.z, first, count);
        y = y * z * sigmoid_vector<R>(z);
      }
      __builtin_memcpy(out + first, &y, count * sizeof(R));
    }
  }
}

}  // namespace

Kernels kernels(Element element, bool complex_state) {
  switch (element) {
    case Element::kFloat64:
      return complex_state ? Scan<double, double, true>::kernels() : Scan<double, double, false>::kernels();
    case Element::kBFloat16:
      return complex_state ? Scan<BFloat16, float, true>::kernels() : Scan<BFloat16, float, false>::kernels();
    case Element::kFloat16:
      return complex_state ? Scan<Float16, float, true>::kernels() : Scan<Float16, float, false>::kernels();
    default:
      return complex_state ? Scan<float, float, true>::kernels() : Scan<float, float, false>::kernels();
  }
}

StepKernel step_kernel(bool float64) { return float64 ? step<double> : step<float>; }

}  // namespace mamba_ssm::cpu::SCAN_NAMESPACE
