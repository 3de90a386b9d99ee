// Pooling of a batch and its transpose: what the fields are made of, checked, and shared by threads.
#include <algorithm>
#include <cstring>

#include "bindings.hpp"
#include "kernels.hpp"
#include "machine.hpp"

namespace embedding {

namespace {

constexpr size_t kLeastSamples = 256;  // worth a second thread
constexpr size_t kLeastRows = 2048;
constexpr size_t kLeastNumbers = 16 * kLeastRows;
constexpr size_t kLookedAt = 256;  // samples that say how long a field's bags are

using Offsets = Given<int64_t>;
using Inverse = Given<int32_t>;
// [2, tables + 1]: where those of each table start in the arrays of a batch.
using Starts = nb::ndarray<const int64_t, nb::shape<-1>, nb::c_contig, nb::device::cpu>;
using Mask = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// (table, pooling kind, first column, places of a sequence)
using PythonField = std::tuple<size_t, int, size_t, size_t>;
// (vectors or gradients, mask) of a sequence
using PythonSequence = std::tuple<ConstMatrix, Mask>;

// What the fields of a sample are made of.
class PoolLayout {
 public:
  PoolLayout(const std::vector<PythonField>& fields, const std::vector<size_t>& dims)
      : bags_(fields.size()), dims_(dims), of_table_(dims.size()) {
    for (size_t bag = 0; bag < bags_; ++bag) {
      const auto& [table, kind, column, places] = fields[bag];
      require(table < dims_.size(), "each field has one of the tables");
      const auto as = static_cast<PoolKind>(kind);
      of_table_[table].push_back({as, bag, column, places, nullptr, nullptr});
      if (as == PoolKind::sequence) {
        sequences_.emplace_back(table, of_table_[table].size() - 1);
      } else {
        width_ = std::max(width_, column + dims_[table]);
      }
    }
  }

  // A call for each table; `fields` is kept until they are done.
  template <class Pooled>
  std::vector<Pool> calls(size_t samples, const Offsets& offsets, const Spans& spans,
                          const Starts& starts, const Inverse& inverse, const Matrix& rows,
                          const Pooled& pooled, const std::vector<PythonSequence>& sequences,
                          std::vector<std::vector<PoolField>>& fields) const {
    const size_t count = dims_.size();
    const bool bags = offsets.shape(0) > 0;
    require(pooled.ndim() == 2 && pooled.shape(0) == samples && pooled.shape(1) >= width_,
            "pooled must be [samples, width]");
    require(spans.shape(0) == count && starts.shape(0) == count + 1,
            "spans must be [tables, 3] and starts [tables + 1]");
    require(!bags || offsets.shape(0) == samples * bags_ + 1,
            "offsets must have one entry a bag and one more");
    require(starts(count) == static_cast<int64_t>(inverse.shape(0)),
            "starts must end where inverse does");
    require(sequences.size() == sequences_.size(), "each sequence has its array");
    require(rows.dtype() == pooled.dtype(), "rows and pooled must be of one dtype");
    fields = of_table_;
    for (size_t k = 0; k < sequences.size(); ++k) {
      const auto& [array, mask] = sequences[k];
      const auto [table, number] = sequences_[k];
      PoolField& field = fields[table][number];
      const size_t places = samples * field.max_length;
      require(array.size() == places * dims_[table] && (!mask.size() || mask.size() == places),
              "a sequence must be [samples, places, dim] and its mask [samples, places] or empty");
      field.sequence = const_cast<void*>(array.data());
      field.mask = mask.size() ? mask.data() : nullptr;
    }
    const bool wide = rows.dtype() == nb::dtype<double>();
    std::vector<Pool> calls(count);
    for (size_t t = 0; t < count; ++t) {
      const int64_t distinct = spans(t, 1), at = spans(t, 2);
      require(distinct >= 0 && at >= 0 && at + distinct * dims_[t] <= rows.size(),
              "the rows of a table must lie inside rows");
      Pool& call = calls[t];
      call.samples = call.last_sample = samples;
      call.bags = bags_;
      call.fields = fields[t].size();
      call.field = fields[t].data();
      call.offsets = bags ? offsets.data() : nullptr;
      call.inverse = inverse.data() + starts(t);
      call.dim = dims_[t];
      call.width = pooled.shape(1);
      call.pooled = const_cast<void*>(static_cast<const void*>(pooled.data()));
      call.rows = static_cast<char*>(rows.data()) + at * (wide ? 8 : 4);
      call.wide = wide;
      call.plain_copy = count == 1 && sequences.empty() && !bags;
      call.last_field = fields[t].size();
      call.last_row = static_cast<int32_t>(distinct);
    }
    return calls;
  }

 private:
  size_t bags_, width_ = 0;
  std::vector<size_t> dims_;
  std::vector<std::vector<PoolField>> of_table_;
  std::vector<std::pair<size_t, size_t>> sequences_;  // table, and place among its fields
};

// As much for each thread and no smaller, where a part costs more than its share.
size_t even(size_t n, size_t least) { return std::max(least, n / threads()); }

void pool_all(const std::vector<Pool>& calls, size_t samples) {
  for (const Pool& call : calls) {
    // A part has to find its place among bags of other tables.
    const bool mixed = call.offsets && call.fields != call.bags;
    share(samples, mixed ? even(samples, kLeastSamples) : kLeastSamples,
          [&call](size_t from, size_t to) {
            Pool part = call;
            part.first_sample = from;
            part.last_sample = to;
            kernels().pool(part);
          });
  }
}

// About how many numbers a field's gradients have.
size_t numbers_of(const Pool& call, const PoolField& field) {
  size_t occurrences = call.samples;
  if (call.offsets) {
    const size_t apart = call.samples / kLookedAt + 1;
    int64_t met = 0;
    for (size_t b = 0; b < call.samples; b += apart) {
      const int64_t* const at = call.offsets + b * call.bags + field.bag;
      met += at[1] - at[0] + 1;  // an empty bag is walked over, too
    }
    occurrences = static_cast<size_t>(met) * apart;
  }
  return occurrences * call.dim;
}

// Fields, over all tables, are shared by threads: each adds what its own give, in the order of samples.
void scatter_by_field(const std::vector<Pool>& calls) {
  struct Share {
    const Pool* call;
    size_t field, before;  // numbers of the fields before it
  };
  std::vector<Share> shares;
  size_t total = 0;
  for (const Pool& call : calls) {
    for (size_t f = 0; f < call.fields; ++f) {
      shares.push_back({&call, f, total});
      total += numbers_of(call, call.field[f]);
    }
  }
  share(total, even(total, kLeastNumbers), [&shares](size_t from, size_t to) {
    for (size_t k = 0; k < shares.size(); ++k) {
      if (shares[k].before < from || shares[k].before >= to) continue;
      Pool part = *shares[k].call;
      part.first_field = shares[k].field;
      while (k + 1 < shares.size() && shares[k + 1].call == shares[k].call &&
             shares[k + 1].before < to) {
        ++k;
      }
      part.last_field = shares[k].field + 1;
      kernels().scatter(part);
    }
  });
}

// Rows are shared by threads, each of which walks all samples.
void scatter_by_row(const Pool& call) {
  const auto rows = static_cast<size_t>(call.last_row);
  share(rows, even(rows, kLeastRows), [&call, rows](size_t from, size_t to) {
    Pool part = call;
    part.some_rows = to - from < rows;
    part.first_row = static_cast<int32_t>(from);
    part.last_row = static_cast<int32_t>(to);
    kernels().scatter(part);
  });
}

// The transpose of pooling. `apart` says of each table whether none of its rows belongs to two fields,
// whose samples would be added to it in turn: the order is that of samples, whoever does it.
void scatter_all(const std::vector<Pool>& calls, const std::vector<bool>& apart) {
  std::vector<Pool> by_field;
  for (size_t t = 0; t < calls.size(); ++t) {
    const size_t row_bytes = calls[t].dim * (calls[t].wide ? 8 : 4);
    char* const rows = static_cast<char*>(calls[t].rows);
    share(static_cast<size_t>(calls[t].last_row), kLeastRows, [=](size_t from, size_t to) {
      std::memset(rows + from * row_bytes, 0, (to - from) * row_bytes);
    });
    if (t < apart.size() && apart[t]) {
      by_field.push_back(calls[t]);
    } else {
      scatter_by_row(calls[t]);
    }
  }
  scatter_by_field(by_field);
}

template <bool Forward, class Pooled>
void run(const PoolLayout& layout, size_t samples, const Offsets& offsets, const Spans& spans,
         const Starts& starts, const Inverse& inverse, const Matrix& rows, const Pooled& pooled,
         const std::vector<PythonSequence>& sequences, const std::vector<bool>& apart) {
  std::vector<std::vector<PoolField>> fields;
  const auto calls =
      layout.calls(samples, offsets, spans, starts, inverse, rows, pooled, sequences, fields);
  nb::gil_scoped_release free;
  if constexpr (Forward) {
    pool_all(calls, samples);
  } else {
    scatter_all(calls, apart);
  }
}

// Rows of these sizes on their way as float16; `work` gets those of each thread.
using Sizes = Given<int64_t>;
using Scales = nb::ndarray<int16_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Halves = nb::ndarray<uint16_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class Numbers>
HalfRows half_rows(const Numbers& numbers, const Sizes& sizes) {
  int64_t total = 0;
  for (size_t i = 0; i < sizes.shape(0); ++i) {
    require(sizes.data()[i] >= 0, "a row has 0 numbers or more");
    total += sizes.data()[i];
  }
  require(total == static_cast<int64_t>(numbers.size()), "sizes must add up to the numbers");
  const bool wide = numbers.dtype() == nb::dtype<double>();
  require(wide || numbers.dtype() == nb::dtype<float>(), "numbers must be float32 or float64");
  void* const data = const_cast<void*>(static_cast<const void*>(numbers.data()));
  return {sizes.shape(0), sizes.data(), wide, data, nullptr, nullptr, nullptr};
}

void share_rows(const HalfRows& call, void (*work)(const HalfRows&)) {
  const nb::gil_scoped_release free;
  share(call.n, kLeastRows, [&](size_t from, size_t to) {
    int64_t before = 0;
    for (size_t i = 0; i < from; ++i) before += call.sizes[i];
    const size_t bytes = static_cast<size_t>(before) * (call.wide ? 8 : 4);
    const auto behind = [&](void* numbers) {
      return numbers ? static_cast<char*>(numbers) + bytes : nullptr;
    };
    work({to - from, call.sizes + from, call.wide, behind(call.numbers), behind(call.rounded),
          call.scales ? call.scales + from : nullptr, call.halves ? call.halves + before : nullptr});
  });
}

void require_halves(const HalfRows& call, size_t numbers, size_t scales, size_t halves) {
  require(scales == call.n && halves == numbers,
          "there must be a scale for each row and a half for each number");
}

void to_halves(const ConstMatrix& numbers, const Sizes& sizes, const Scales& scales,
               const Halves& halves) {
  HalfRows call = half_rows(numbers, sizes);
  require_halves(call, numbers.size(), scales.shape(0), halves.shape(0));
  call.scales = scales.data();
  call.halves = halves.data();
  share_rows(call, kernels().to_half);
}

void from_halves(const Given<int16_t>& scales, const Given<uint16_t>& halves, const Sizes& sizes,
                 const Matrix& numbers) {
  HalfRows call = half_rows(numbers, sizes);
  require_halves(call, numbers.size(), scales.shape(0), halves.shape(0));
  call.scales = const_cast<int16_t*>(scales.data());  // only read
  call.halves = const_cast<uint16_t*>(halves.data());
  share_rows(call, kernels().from_half);
}

void round_halves(const ConstMatrix& numbers, const Sizes& sizes, const Matrix& rounded) {
  HalfRows call = half_rows(numbers, sizes);
  require(rounded.size() == numbers.size() && rounded.dtype() == numbers.dtype(),
          "the rounded numbers must be as many and of the same dtype");
  call.rounded = rounded.data();
  share_rows(call, kernels().round_half);
}

}  // namespace

void bind_pooling(nb::module_& module) {
  module.def("to_halves", &to_halves, "numbers"_a, "sizes"_a, "scales"_a, "halves"_a);
  module.def("from_halves", &from_halves, "scales"_a, "halves"_a, "sizes"_a, "numbers"_a);
  module.def("round_halves", &round_halves, "numbers"_a, "sizes"_a, "rounded"_a);
  nb::class_<PoolLayout>(module, "PoolLayout")
      .def(nb::init<const std::vector<PythonField>&, const std::vector<size_t>&>(), "fields"_a,
           "dims"_a);
  const auto define = [&](const char* name, auto run) {
    module.def(name, run, "layout"_a, "samples"_a, "offsets"_a, "spans"_a, "starts"_a, "inverse"_a,
               "rows"_a, "pooled"_a, "sequences"_a, "apart"_a = std::vector<bool>());
  };
  define("pool", &run<true, Matrix>);
  define("scatter", &run<false, ConstMatrix>);
}

}  // namespace embedding
