// Pooling of a batch and its transpose: what the fields are made of, checked, and shared by threads.
#include <algorithm>

#include "bindings.hpp"
#include "kernels.hpp"
#include "machine.hpp"

namespace embedding {

namespace {

constexpr size_t kLeastSamples = 256;  // worth a second thread
constexpr size_t kLeastRows = 2048;

using Offsets = Given<int64_t>;
using Inverse = Given<int32_t>;
// [2, tables + 1]: where those of each table start in the arrays of a batch.
using Starts = nb::ndarray<const int64_t, nb::shape<2, -1>, nb::c_contig, nb::device::cpu>;
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
    require(spans.shape(0) == count && starts.shape(0) == 2 && starts.shape(1) == count + 1,
            "spans must be [tables, 3] and starts [2, tables + 1]");
    require(!bags || offsets.shape(0) == samples * bags_ + 1,
            "offsets must have one entry a bag and one more");
    require(starts(0, count) == static_cast<int64_t>(inverse.shape(0)),
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
      const int64_t occurrences = starts(1, t + 1) - starts(1, t);
      const int64_t distinct = spans(t, 1), at = spans(t, 2);
      require(distinct >= 0 && at >= 0 && at + distinct * dims_[t] <= rows.size(),
              "the rows of a table must lie inside rows");
      Pool& call = calls[t];
      call.samples = call.last_sample = samples;
      call.bags = bags_;
      call.fields = fields[t].size();
      call.field = fields[t].data();
      call.offsets = bags ? offsets.data() : nullptr;
      call.inverse = inverse.data() + starts(0, t);
      call.rounds = occurrences ? (starts(0, t + 1) - starts(0, t)) / occurrences : 1;
      call.dim = dims_[t];
      call.width = pooled.shape(1);
      call.pooled = const_cast<void*>(static_cast<const void*>(pooled.data()));
      call.rows = static_cast<char*>(rows.data()) + at * (wide ? 8 : 4);
      call.wide = wide;
      call.plain_copy = count == 1 && sequences.empty() && !bags && call.rounds == 1;
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

// Pooling, by samples; or its transpose, by rows, so that each row's sum keeps the order of samples.
template <bool Forward, class Pooled>
void run(const PoolLayout& layout, size_t samples, const Offsets& offsets, const Spans& spans,
         const Starts& starts, const Inverse& inverse, const Matrix& rows, const Pooled& pooled,
         const std::vector<PythonSequence>& sequences) {
  std::vector<std::vector<PoolField>> fields;
  const auto calls =
      layout.calls(samples, offsets, spans, starts, inverse, rows, pooled, sequences, fields);
  nb::gil_scoped_release free;
  for (const Pool& call : calls) {
    const size_t n = Forward ? samples : call.last_row;
    share(n, Forward ? kLeastSamples : kLeastRows, [&call](size_t from, size_t to) {
      Pool part = call;
      if constexpr (Forward) {
        part.first_sample = from;
        part.last_sample = to;
        kernels().pool(part);
      } else {
        part.first_row = static_cast<int32_t>(from);
        part.last_row = static_cast<int32_t>(to);
        kernels().scatter(part);
      }
    });
  }
}

}  // namespace

void bind_pooling(nb::module_& module) {
  nb::class_<PoolLayout>(module, "PoolLayout")
      .def(nb::init<const std::vector<PythonField>&, const std::vector<size_t>&>(), "fields"_a,
           "dims"_a);
  const auto define = [&](const char* name, auto run) {
    module.def(name, run, "layout"_a, "samples"_a, "offsets"_a, "spans"_a, "starts"_a, "inverse"_a,
               "rows"_a, "pooled"_a, "sequences"_a);
  };
  define("pool", &run<true, Matrix>);
  define("scatter", &run<false, ConstMatrix>);
}

}  // namespace embedding
