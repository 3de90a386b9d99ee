// Plans: the distinct ids of batches.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "batch_plan.hpp"
#include "bind_arrays.hpp"

namespace embedding {

namespace {

// (floats of a row, whether fields share rows, rounds of a hash stack, its rows per round)
using PythonTable = std::tuple<size_t, bool, uint32_t, uint64_t>;

nb::tuple plan_tables(const Ids& ids, const Offsets& offsets, const Inverse& table_of_field,
                     const std::vector<PythonTable>& tables, uint64_t value_mask,
                     uint32_t shards) {
  const size_t fields = table_of_field.shape(0);
  const bool bags = offsets.shape(0) > 0;
  require(shards >= 1 && fields >= 1 && !tables.empty(), "there must be a shard, a field, a table");
  const size_t count = bags ? offsets.shape(0) - 1 : ids.shape(0);
  require(count % fields == 0 || tables.size() == 1, "a sample has one bag for each field");
  require(!bags || static_cast<size_t>(offsets.data()[count]) == ids.shape(0),
          "offsets must end where ids do");
  for (size_t f = 0; f < fields; ++f) {
    require(table_of_field.data()[f] >= 0 &&
                static_cast<size_t>(table_of_field.data()[f]) < tables.size(),
            "each field has one of the tables");
  }
  std::vector<TableShape> shapes;
  for (const auto& [dim, share_rows, rounds, rows] : tables) {
    require(!rounds || rows, "a hash stack has at least one row per round");
    shapes.push_back({dim, share_rows, rounds, rows});
  }
  BatchPlan plan;
  {
    nb::gil_scoped_release free;
    plan = plan_batch({ids.data(), ids.shape(0), bags ? offsets.data() : nullptr, count, fields,
                       table_of_field.data(), value_mask, shards},
                      shapes);
  }
  const size_t n = shapes.size();
  const auto rows = static_cast<size_t>(plan.spans[3 * n - 3] + plan.spans[3 * n - 2]);
  const size_t inverse = plan.inverse.size(), occurrences = plan.occurrences.size();
  return nb::make_tuple(give<uint64_t>(std::move(plan.ids), {rows}),
                        give<int64_t>(std::move(plan.spans), {n, 3}),
                        give<int64_t>(std::move(plan.bounds), {n, size_t{shards} + 1}),
                        give<int32_t>(std::move(plan.inverse), {inverse}),
                        give<int64_t>(std::move(plan.occurrences), {occurrences}),
                        give<int64_t>(std::move(plan.starts), {2, n + 1}));
}

}  // namespace

void bind_plan(nb::module_& module) {
  module.def("plan_tables", &plan_tables, nb::arg("ids"), nb::arg("offsets"),
             nb::arg("table_of_field"), nb::arg("tables"), nb::arg("value_mask"),
             nb::arg("shards"));
}

}  // namespace embedding
