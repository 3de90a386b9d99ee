// Pooling and its transpose.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind_arrays.hpp"
#include "kernels.hpp"
#include "threads.hpp"

namespace embedding {

namespace {

constexpr size_t kLeastSamples = 256;  // worth a second thread
constexpr size_t kLeastRows = 2048;

// (pooling kind, first column, places of a sequence, its array, its mask)
using PythonField = std::tuple<int, size_t, size_t, ConstMatrix, Bytes>;

class Fields {
 public:
  Fields(const std::vector<PythonField>& fields, size_t samples, size_t dim, size_t width) {
    for (const auto& [kind, column, places, sequence, mask] : fields) {
      const auto as = static_cast<PoolKind>(kind);
      if (as == PoolKind::sequence) {
        require(sequence.size() == samples * places * dim &&
                    (mask.size() == 0 || mask.size() == samples * places),
                "a sequence must be [samples, places, dim] and its mask [samples, places] or empty");
      } else if (as != PoolKind::other_table) {
        require(column + dim <= width, "a pooled field must lie inside the pooled array");
      }
      fields_.push_back({as, column, places, const_cast<void*>(sequence.data()), mask.size() ? mask.data() : nullptr});
    }
  }
  const std::vector<PoolField>& all() const { return fields_; }

 private:
  std::vector<PoolField> fields_;
};

template <class Pooled>
Pool pool_call(const std::vector<PoolField>& fields, size_t samples, const Offsets& offsets,
               const Inverse& inverse, size_t rounds, const Pooled& pooled, const Matrix& rows) {
  require(rows.ndim() == 2 && pooled.ndim() == 2 && pooled.shape(0) == samples,
          "pooled must be [samples, width] and rows [distinct, dim]");
  const bool bags = offsets.shape(0) > 0;
  require(!bags || offsets.shape(0) == samples * fields.size() + 1,
          "offsets must have one entry a bag and one more");
  Pool call{};
  call.samples = samples;
  call.fields = fields.size();
  call.field = fields.data();
  call.offsets = bags ? offsets.data() : nullptr;
  call.inverse = inverse.data();
  call.rounds = rounds;
  call.dim = rows.shape(1);
  call.width = pooled.shape(1);
  call.pooled = const_cast<void*>(pooled.data());  // the scatter only reads it
  call.rows = rows.data();
  call.wide = is_wide(rows);
  call.last_sample = samples;
  call.last_row = static_cast<int32_t>(rows.shape(0));
  return call;
}

void pool_bags(const std::vector<PythonField>& fields, size_t samples, const Offsets& offsets,
          const Inverse& inverse, size_t rounds, const Matrix& pooled, const Matrix& rows,
          bool plain_copy) {
  const Fields own(fields, samples, rows.shape(1), pooled.shape(1));
  Pool call = pool_call(own.all(), samples, offsets, inverse, rounds, pooled, rows);
  call.plain_copy = plain_copy;
  nb::gil_scoped_release free;
  share(samples, kLeastSamples, [&call](size_t from, size_t to) {
    Pool part = call;
    part.first_sample = from;
    part.last_sample = to;
    kernels().pool(part);
  });
}

void scatter_bags(const std::vector<PythonField>& fields, size_t samples, const Offsets& offsets,
             const Inverse& inverse, size_t rounds, const ConstMatrix& pooled, const Matrix& rows) {
  const Fields own(fields, samples, rows.shape(1), pooled.shape(1));
  const Pool call = pool_call(own.all(), samples, offsets, inverse, rounds, pooled, rows);
  nb::gil_scoped_release free;
  // By rows, not by samples: each row's sum keeps the order of samples.
  share(rows.shape(0), kLeastRows, [&call](size_t from, size_t to) {
    Pool part = call;
    part.first_row = static_cast<int32_t>(from);
    part.last_row = static_cast<int32_t>(to);
    kernels().scatter(part);
  });
}

}  // namespace

void bind_pooling(nb::module_& module) {
  module.def("pool", &pool_bags, nb::arg("fields"), nb::arg("samples"), nb::arg("offsets"),
             nb::arg("inverse"), nb::arg("rounds"), nb::arg("pooled"), nb::arg("rows"),
             nb::arg("plain_copy"));
  module.def("scatter", &scatter_bags, nb::arg("fields"), nb::arg("samples"), nb::arg("offsets"),
             nb::arg("inverse"), nb::arg("rounds"), nb::arg("pooled"), nb::arg("rows"));
}

}  // namespace embedding
