"""Mutants of the optimizers' kernels, csrc/kernels/optim."""

from __future__ import annotations

from simt.mutants.mutant import Mutant

UPDATE, ADAM, SGD = "optim/update.cuh", "optim/adam.cu", "optim/sgd.cu"
FLAG = """    if (blockIdx.x == 0 && threadIdx.x == 0 && scalars.found_inf)
      ptx::store_any(scalars.found_inf, 1.0f);
"""
NEW_STEP = "          ptx::block_sync();  // all threads have used the previous factors\n"
HAVE_FACTORS = "set_factors(entry.step);\n          ptx::block_sync();"
SHARED = "  ptx::block_sync();\n\n  for_each_span"
LAST = "if (!is_last_block(tickets, gridDim.x, shared.last)) return;"
BY_CHANCE = "if (!rounding.by_chance || is_f32() || dtype_ != DType::bf16)"
COPY = "    if (copy.data) copy.store_nearest(i, p);\n"

# Of test_updates.py: names of tests, by what they take.
SKIP, NORM, SIZES, EMPTY = "nothing_is_written", "norm_that_is_not", "sizes", "empty_param"
DTYPES, LONG, ALIGNED, CHANCE = "dtypes", "long_lists", "alignments", "stochastic_rounding"
COPIES, HALF = "copies_are", "scaled_half"


def _mutant(
    name: str, file: str, old: str, new: str, select: str, tests: str = "updates", **more: str
) -> Mutant:
    return Mutant(name, file, old, new, tests, select, **more)


MUTANTS = (
    _mutant("the grid before may still run", UPDATE, "  begin_grid();\n", "", SIZES),
    _mutant("an overflow is no reason", UPDATE, "  if (is_skipped(scalars)) return;\n", "", SKIP),
    _mutant("a bad norm is no overflow", UPDATE, FLAG, "", NORM),
    _mutant("a bad norm updates", UPDATE, f"{FLAG}    return;\n", FLAG, NORM),
    _mutant("the first tensor's factors", UPDATE, "if (shared.differ &&", "if (false &&", LONG),
    _mutant(
        "thread 0 alone compares steps",
        UPDATE,
        "differ = ptx::block_any(differ);",
        "ptx::block_sync();",
        LONG,
    ),
    _mutant("the share is not waited for", UPDATE, SHARED, "  for_each_span", SIZES),
    _mutant(
        "factors change while they are used",
        UPDATE,
        NEW_STEP,
        "",
        "long_lists and 403",
        variant="tsan",
    ),
    _mutant("factors are not waited for", UPDATE, HAVE_FACTORS, "set_factors(entry.step);", LONG),
    _mutant("every block counts", UPDATE, LAST, ";", SIZES),
    _mutant("the first 256 are counted", UPDATE, "+= kUpdateThreads) *", "+= table.size) *", LONG),
    _mutant(
        "tickets without steps",
        UPDATE,
        "has_steps(list) ? services.tickets(1) : nullptr",
        "services.tickets(1)",
        "test_sgd",
        "updates_torch",
    ),
    _mutant("no block for empty tensors", UPDATE, "target), 1);", "target), 0);", EMPTY),
    _mutant(
        "a piece's chance",
        UPDATE,
        "noise_key_behind(key, behind)",
        "noise_key_behind(key, 0)",
        CHANCE,
    ),
    _mutant("past the end", UPDATE, "i + kUpdateElements <= n;", "i < n;", SIZES),
    _mutant("no tail", UPDATE, "  if (last < n) update.template visit<1>(last);\n", "", SIZES),
    _mutant("every chunk is the first", UPDATE, " + offset * size_of(dtype)", "", SIZES),
    _mutant("all is aligned", UPDATE, "(data) & mask) == 0", "(data) & 0) == 0", ALIGNED),
    _mutant("what is FP32 is aligned", UPDATE, "DType::f32 && aligned_)", "DType::f32)", ALIGNED),
    _mutant("all is FP32", UPDATE, "i * (is_f32() ? 4 : 2)", "i * 4", DTYPES),
    _mutant(
        "always by chance",
        UPDATE,
        BY_CHANCE,
        BY_CHANCE.replace("!rounding.by_chance || ", ""),
        DTYPES,
    ),
    _mutant(
        "FP16 by chance",
        UPDATE,
        BY_CHANCE,
        BY_CHANCE.replace(" || dtype_ != DType::bf16", ""),
        CHANCE,
    ),
    _mutant(
        "the same chance for all",
        UPDATE,
        "(rounding.key, i + j, pair)",
        "(rounding.key, j, pair)",
        CHANCE,
    ),
    _mutant("one chance", UPDATE, "pair) >> shift & 0xffff", "pair) & 0xffff", CHANCE),
    _mutant(
        "a chunk's chance",
        UPDATE,
        "span.chunk - entry.first_chunk);",
        "0);",
        CHANCE,
    ),
    _mutant("a tensor's chance", UPDATE, "static_cast<uint32_t>(span.tensor),", "0,", CHANCE),
    _mutant(
        "no ascent", UPDATE, "op.options.lr, op.options.maximize", "op.options.lr, false", HALF
    ),
    _mutant(
        "the next update's bias",
        ADAM,
        "(options, step, number)",
        "(options, step, number + 1)",
        SIZES,
    ),
    _mutant(
        "scaled gradients", ADAM, "      g[j] = used_gradient(factors, g[j], p[j]);\n", "", HALF
    ),
    _mutant(
        "the first moment stays",
        ADAM,
        "    exp_avg.store_state(i, first, rounding, 0, 16);\n",
        "",
        SIZES,
    ),
    _mutant(
        "moments have one chance",
        ADAM,
        "second, rounding, 1, 0)",
        "second, rounding, 0, 0)",
        CHANCE,
    ),
    _mutant(
        "the largest is not used",
        ADAM,
        "second[j] = larger(most[j], second[j])",
        "most[j] = larger(most[j], second[j])",
        DTYPES,
    ),
    _mutant(
        "moments have one dtype",
        ADAM,
        "exp_avg_sq(e.exp_avg_sq, e.exp_avg_sq_dtype",
        "exp_avg_sq(e.exp_avg_sq, e.exp_avg_dtype",
        DTYPES,
    ),
    _mutant(
        "gradients are plain",
        ADAM,
        "param.is_plain() && grad.is_plain() &&",
        "param.is_plain() &&",
        DTYPES,
    ),
    _mutant("no copy by adam", ADAM, COPY, "", COPIES),
    _mutant("a copy of the weight before", ADAM, COPY, COPY.replace("(i, p)", "(i, g)"), COPIES),
    _mutant(
        "no first update",
        SGD,
        "/*is_first=*/number == 1",
        "/*is_first=*/false",
        "dampening",
        "updates_torch",
    ),
    _mutant(
        "the buffer stays", SGD, "      momentum.store_state(i, m, rounding, 0, 16);\n", "", SIZES
    ),
    _mutant(
        "not Nesterov's",
        SGD,
        "g[j] = with_lookahead(factors, m[j], g[j])",
        "g[j] = m[j]",
        "nesterov",
        "updates_torch",
    ),
    _mutant(
        "the buffer is plain",
        SGD,
        "grad.is_plain() && momentum.is_plain()",
        "grad.is_plain()",
        DTYPES,
    ),
    _mutant("no copy by sgd", SGD, COPY, "", COPIES),
)
