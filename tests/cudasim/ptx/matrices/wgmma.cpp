// Multiply matrices in shared memory by warpgroups, asynchronously: wgmma.
#include <array>

#include "memory/memory.h"

namespace cudasim {
namespace {

// ---- operands -----------------------------------------------------------------------------------

// Finds the address of element (mn, k) of an operand, as "Asynchronous Warpgroup Level Canonical
// Layouts" of the PTX ISA defines it. With a swizzle of S bytes and 16-bit elements:
//   K-major:  rows of S bytes along k; 8 of them, then the next 8 a stride offset on
//   MN-major: rows of S bytes along mn; 8 of k, then a stride offset; the next S bytes of mn a
//             leading offset on
// and address bits from 4 on are exchanged by those from 7 on.
struct Layout {
  u32 start, leading, stride, span;
  bool is_mn_major;

  Layout(u64 descriptor, bool mn_major) : is_mn_major(mn_major) {
    start = static_cast<u32>(descriptor & 0x3fff) << 4;
    leading = static_cast<u32>(descriptor >> 16 & 0x3fff) << 4;
    stride = static_cast<u32>(descriptor >> 32 & 0x3fff) << 4;
    constexpr u64 kReserved = u64{3} << 14 | u64{3} << 30 | u64{7} << 46 | u64{0x3ff} << 52;
    if (descriptor & kReserved)
      fault("Mask addresses and offsets to 18 bits before they are shifted.",
            "reserved bits of descriptor %016lx", descriptor);
    if (descriptor >> 49 & 7)
      fault("The executor has operands that are aligned to their swizzle.", "a base offset of %lu",
            descriptor >> 49 & 7);
    const u32 mode = static_cast<u32>(descriptor >> 62);
    if (mode == 0) fault("The executor has swizzled operands.", "no swizzle");
    span = mode == 1 ? 128 : mode == 2 ? 64 : 32;
  }

  // The address of 8 contiguous elements.
  u32 address(u32 mn, u32 k) const {
    const u32 at = is_mn_major ? start + mn * 2 % span + mn * 2 / span * leading + k % 8 * span +
                                     k / 8 * stride
                               : start + mn % 8 * span + mn / 8 * stride + k * 2;
    return at ^ (at >> 3 & (span - 1) & ~15u);
  }
};

// The engine's reads of an operand: visit(mn, k, 8 elements).
template <class Visit>
void each_eight(const Layout& layout, u32 begin, u32 end, Visit visit) {
  const u32 mn_step = layout.is_mn_major ? 8 : 1, k_step = layout.is_mn_major ? 1 : 8;
  for (u32 mn = begin; mn < end; mn += mn_step)
    for (u32 k = 0; k < 16; k += k_step) visit(mn, k, layout.address(mn, k));
}

Role role_of_product(Warp& w) {
  return {w.block->actor(Engine::product, static_cast<u32>(w.index)), w.product_groups + 1, false};
}

void check_operand(Warp& w, const Instruction& it, const Layout& layout, u32 begin, u32 end) {
  Accesses reads(w, it, role_of_product(w));
  each_eight(layout, begin, end, [&](u32, u32, u32 address) {
    shared_bytes(*w.block, address, 16, 16);
    check_written(*w.block, address, 16);
    check_proxy(*w.block, address, 16);
    reads.shared(address, 16, 0);
  });
  reads.finish();
}

// ---- products -----------------------------------------------------------------------------------

// it.count: n; it.kind: bf16; it.flags: 1 and 2 negate a and b, 4 and 8 have them MN-major
enum Flags { negates_a = 1, negates_b = 2, a_mn_major = 4, b_mn_major = 8 };

Layout layout_a(const Product& p) { return {p.a, (p.instruction->flags & a_mn_major) != 0}; }
Layout layout_b(const Product& p) { return {p.b, (p.instruction->flags & b_mn_major) != 0}; }
u32 first_row(const Warp& w) { return static_cast<u32>(w.index % 4) * 16; }

void widen_eight(const u8* from, bool is_bf16, bool negates, float* to) {
  u16 bits[8];
  memcpy(bits, from, 16);
  for (int i = 0; i < 8; ++i) {
    const float x = is_bf16 ? widen(bf16{bits[i]}) : widen(f16{bits[i]});
    to[i] = negates ? -x : x;
  }
}

// Multiply the warp's 16 rows of the product. Register i of a lane has row
// lane / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 (lane % 4) + i % 2.
void multiply(Warp& w, const Product& product, float* values) {
  const Instruction& it = *product.instruction;
  const int n = it.count;
  alignas(64) static float a[16][16], b[16][256], sums[16][256];
  const u8* const shared = w.block->shared.base;
  float eight[8];
  const Layout of_a = layout_a(product), of_b = layout_b(product);
  const u32 row = first_row(w);
  each_eight(of_a, row, row + 16, [&](u32 m, u32 k, u32 address) {
    widen_eight(shared + address, it.kind, it.flags & negates_a, eight);
    for (u32 i = 0; i < 8; ++i)
      (of_a.is_mn_major ? a[m - row + i][k] : a[m - row][k + i]) = eight[i];
  });
  each_eight(of_b, 0, static_cast<u32>(n), [&](u32 j, u32 k, u32 address) {
    widen_eight(shared + address, it.kind, it.flags & negates_b, eight);
    for (u32 i = 0; i < 8; ++i) (of_b.is_mn_major ? b[k][j + i] : b[k + i][j]) = eight[i];
  });
  const auto each_register = [&](auto visit) {
    for (int i = 0; i < n / 2; ++i)
      for (int lane = 0; lane < kLanes; ++lane)
        visit(values[i * kLanes + lane],
              sums[lane / 4 + 8 * (i / 2 % 2)][8 * (i / 4) + 2 * (lane % 4) + i % 2]);
  };
  each_register([&](float& value, float& sum) { sum = product.accumulates ? value : 0.0f; });
  for (int m = 0; m < 16; ++m)
    for (int k = 0; k < 16; ++k) {
      const float x = a[m][k];
#pragma GCC ivdep
      for (int j = 0; j < n; ++j) sums[m][j] = std::fma(x, b[k][j], sums[m][j]);
    }
  each_register([&](float& value, float& sum) { value = canonical(sum); });
}

// ---- accumulators in flight ---------------------------------------------------------------------

// A register of a product in flight holds a token of its chain and number. A move of the register
// moves the token, and arithmetic on it makes garbage. The end of the chain replaces all tokens.
constexpr u32 kToken = 0x7fa00000u;  // signalling NaNs, which arithmetic does not make
constexpr u32 kTokens = 1u << 20;

u32 token(int chain, int i) { return kToken | static_cast<u32>(chain) << 8 | static_cast<u32>(i); }
bool is_token(u32 bits) { return bits - kToken < kTokens; }

void copy_registers(Warp& w, const Instruction& it, float* values, bool to_registers) {
  for (size_t i = 0; i < it.more.size(); ++i) {
    float* const kept = values + i * kLanes;
    if (to_registers)
      memcpy(w.destination(it.more[i]), kept, sizeof(float) * kLanes);
    else
      memcpy(kept, w.source(it.more[i]), sizeof(float) * kLanes);
  }
}

// The chain of the accumulator's tokens, or a new one.
int chain_of(Warp& w, const Instruction& it, bool accumulates) {
  const u32 first = w.source(it.more[0])[0];
  if (accumulates && is_token(first)) {
    const int chain = static_cast<int>(first - kToken) >> 8;
    if (chain < static_cast<int>(w.chains.size()) &&
        w.chains[static_cast<size_t>(chain)].in_flight) {
      for (size_t i = 0; i < it.more.size(); ++i)
        for (int lane = 0; lane < kLanes; ++lane)
          if (w.source(it.more[i])[lane] != token(chain, static_cast<int>(i)))
            fault("wgmma.wait_group comes before any use of an accumulator.",
                  "register %zu of an accumulator in flight was touched", i);
      return chain;
    }
  }
  size_t chain = 0;
  while (chain < w.chains.size() && w.chains[chain].in_flight) ++chain;
  if (chain == w.chains.size()) w.chains.emplace_back();
  Chain& c = w.chains[chain];
  c.values.resize(it.more.size() * kLanes);
  copy_registers(w, it, c.values.data(), false);
  if (accumulates)
    for (const float value : c.values)
      if (is_token(std::bit_cast<u32>(value)))
        fault("wgmma.wait_group comes before any use of an accumulator.",
              "an accumulator of several products in flight");
  return static_cast<int>(chain);
}

void replace_tokens(Warp& w, const std::vector<bool>& ended) {
  u32* const end = w.registers + w.kernel->words;
  for (u32* row = w.registers; row < end; row += kLanes) {
    u32 found = 0;
    for (int lane = 0; lane < kLanes; ++lane)
      found |= static_cast<u32>(is_token(row[lane])) << lane;
    each_lane(found, [&](int lane) {
      const u32 chain = (row[lane] - kToken) >> 8, i = (row[lane] - kToken) & 255;
      if (chain < ended.size() && ended[chain])
        row[lane] = std::bit_cast<u32>(w.chains[chain].values[i * kLanes + static_cast<u32>(lane)]);
    });
  }
}

// ---- instructions -------------------------------------------------------------------------------

// rows[0], rows[1]: descriptors; more: the accumulator; predicates[0]: accumulates
void issue(Warp& w, const Instruction& it, u32) {
  if (!w.products_fenced)
    fault("wgmma.fence orders registers and shared memory before the first wgmma.",
          "without a wgmma.fence before it");
  if (w.index / 4 * 4 + 4 > static_cast<int>(w.block->warps.size()))
    fault("Four warps, the first a multiple of 4.", "by no whole warpgroup");
  const u64 a = get<u64>(w.source(it.rows[0]), 0), b = get<u64>(w.source(it.rows[1]), 0);
  const u32 accumulates = w.source_predicate(it, 0);
  bool same = accumulates == 0 || accumulates == kAllLanes;
  for (int lane = 1; lane < kLanes; ++lane)
    same &= get<u64>(w.source(it.rows[0]), lane) == a && get<u64>(w.source(it.rows[1]), lane) == b;
  if (!same) fault("Descriptors and scale-d are the same in all threads.", "lanes differ");
  Product product{&it, a, b, accumulates != 0, -1};
  check_operand(w, it, layout_a(product), first_row(w), first_row(w) + 16);
  check_operand(w, it, layout_b(product), 0, static_cast<u32>(it.count));
  if (w.grid->async == Async::early) {
    static std::array<float, 128 * kLanes> values;
    copy_registers(w, it, values.data(), false);
    multiply(w, product, values.data());
    copy_registers(w, it, values.data(), true);
  } else {
    product.chain = chain_of(w, it, product.accumulates);
    ++w.chains[static_cast<size_t>(product.chain)].in_flight;
    for (size_t i = 0; i < it.more.size(); ++i)
      for (int lane = 0; lane < kLanes; ++lane)
        w.destination(it.more[i])[lane] = token(product.chain, static_cast<int>(i));
  }
  w.products.back().push_back(product);
}

void wait(Warp& w, const Instruction& it, u32) {
  std::vector<bool> ended(w.chains.size());
  while (static_cast<s64>(w.products.size()) - 1 > it.offset) {
    if (w.grid->async != Async::early)
      for (const Product& product : w.products.front()) {
        const size_t chain = static_cast<size_t>(product.chain);
        multiply(w, product, w.chains[chain].values.data());
        if (--w.chains[chain].in_flight == 0) ended[chain] = true;
      }
    w.products.pop_front();
  }
  if (w.product_groups > it.offset)
    w.clock.set(role_of_product(w).actor, static_cast<u32>(w.product_groups - it.offset));
  for (const bool any : ended)
    if (any) return replace_tokens(w, ended);
}

// wgmma.mma_async.sync.aligned.m64nNk16.f32.T.T d, a, b, scale-d, scale-a, scale-b, trans-a,
// trans-b
bool decode_issue(Decoder& d) {
  const std::string& shape = d.words.at(4);
  const std::string& half = d.words.back();
  const int n = shape.starts_with("m64n") ? atoi(shape.c_str() + 4) : 0;
  if (shape != "m64n" + std::to_string(n) + "k16" || n % 8 || n < 8 || n > 256 ||
      d.words.size() != 8 || d.words[5] != "f32" || d.words[6] != half ||
      (half != "f16" && half != "bf16") || d.operands.size() != 8)
    d.unknown("a shape or a type");
  if (d.operands[1].type == Operand::vector) d.unknown("an operand in registers");
  d.to.count = n;
  d.to.kind = half == "bf16";
  if (static_cast<int>(d.operands[0].parts.size()) != n / 2)
    d.unknown("another number of registers");
  for (const Operand& part : d.operands[0].parts) d.to.more.push_back(d.destination(part, 32));
  for (size_t i = 0; i < 2; ++i) d.to.rows[i] = d.source(1 + i, 64);
  d.set_source_predicate(0, 3);
  for (size_t i = 4; i < 8; ++i)
    if (d.operands[i].value == (i < 6 ? -1 : 1)) d.to.flags |= 1 << (i - 4);
  return d.runs(issue);
}

}  // namespace

bool decode_wgmma(Decoder& d) {
  if (d.name() != "wgmma") return false;
  d.to.flow = Flow::aligned;
  const std::string& what = d.words.at(1);
  if (what == "mma_async") return decode_issue(d);
  if (what == "fence")
    return d.runs([](Warp& w, const Instruction&, u32) { w.products_fenced = true; });
  if (what == "commit_group")
    return d.runs([](Warp& w, const Instruction&, u32) {
      w.products.emplace_back();
      ++w.product_groups;
    });
  if (what != "wait_group") return false;
  d.to.offset = d.operands.at(0).value;
  return d.runs(wait);
}

}  // namespace cudasim
