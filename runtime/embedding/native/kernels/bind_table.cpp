// Tables: lookups, pushes, snapshots.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind_arrays.hpp"
#include "options.hpp"
#include "table.hpp"

namespace embedding {

namespace {

template <class Array>
std::vector<Part> parts_of(const std::vector<Table*>& tables, const Ids& ids, const Spans& spans,
                           const Int64s& handles, const Int64s& writes, const Array& numbers) {
  const auto n = static_cast<int64_t>(ids.shape(0)), all = static_cast<int64_t>(numbers.size());
  require(spans.shape(0) == tables.size(), "spans must be [tables, 3]");
  require(handles.shape(0) == ids.shape(0) && writes.shape(0) == ids.shape(0),
          "ids, handles and writes must have one length");
  std::vector<Part> parts;
  for (size_t t = 0; t < tables.size(); ++t) {
    const Options& options = tables[t]->options();
    const int64_t first = spans(t, 0), rows = spans(t, 1), at = spans(t, 2);
    require(numbers.dtype() == (options.wide() ? nb::dtype<double>() : nb::dtype<float>()),
            "values and gradients must be of the tables' dtype");
    require(first >= 0 && rows >= 0 && first <= n && rows <= n - first,
            "the rows of a table must lie inside ids");
    require(at >= 0 && at <= all && rows <= (all - at) / static_cast<int64_t>(options.dim),
            "the rows of a table must lie inside values or gradients");
    char* const start = static_cast<char*>(const_cast<void*>(
        static_cast<const void*>(numbers.data())));  // a push only reads it
    parts.push_back({ids.data() + first, handles.data() + first, writes.data() + first,
                     start + at * options.compute_bytes(), static_cast<size_t>(rows)});
  }
  return parts;
}

void read_rows(const std::vector<Table*>& tables, const Ids& ids, const Spans& spans,
               const Int64s& handles, const Int64s& writes, const Matrix& values, bool create,
               int64_t step) {
  const auto parts = parts_of(tables, ids, spans, handles, writes, values);
  nb::gil_scoped_release free;
  for (size_t t = 0; t < tables.size(); ++t) tables[t]->read(parts[t], create, step);
}

size_t refresh_rows(const std::vector<Table*>& tables, const Ids& ids, const Spans& spans,
                    const Int64s& handles, const Int64s& writes, const Matrix& values,
                    int64_t step) {
  const auto parts = parts_of(tables, ids, spans, handles, writes, values);
  nb::gil_scoped_release free;
  size_t replaced = 0;
  for (size_t t = 0; t < tables.size(); ++t) replaced += tables[t]->refresh(parts[t], step);
  return replaced;
}

using PythonPush = std::tuple<Ids, Spans, Int64s, Int64s, ConstMatrix>;

void push_rows(const std::vector<Table*>& tables, const std::vector<PythonPush>& pushes,
               int64_t step, const std::vector<double>& lrs, const Int64s& staleness) {
  require(staleness.shape(0) == 64, "staleness must have 64 places");
  require(lrs.size() == tables.size(), "each table has a learning rate");
  std::vector<std::vector<Part>> by_table(tables.size());
  for (const auto& [ids, spans, handles, writes, gradients] : pushes) {
    const auto parts = parts_of(tables, ids, spans, handles, writes, gradients);
    for (size_t t = 0; t < tables.size(); ++t) by_table[t].push_back(parts[t]);
  }
  nb::gil_scoped_release free;
  for (size_t t = 0; t < tables.size(); ++t) {
    tables[t]->push(by_table[t], step, lrs[t], staleness.data());
  }
}

nb::tuple all_rows(const Table& table) {
  Rows rows;
  {
    nb::gil_scoped_release free;
    rows = table.rows();
  }
  const size_t n = rows.ids.size();
  const bool wide = table.options().wide();
  return nb::make_tuple(give<uint64_t>(std::move(rows.ids), {n}),
                        give_floats(std::move(rows.values), n, table.options().dim, wide),
                        give_floats(std::move(rows.state), n, table.options().state_floats(), wide),
                        give<int64_t>(std::move(rows.writes), {n}));
}

// A snapshot or an image of n rows, as `restore` takes it.
template <class Found>
nb::dict give_rows(const Table& table, Found found, size_t n, size_t stamps, size_t sightings) {
  const size_t removed = found.removed.size();
  nb::dict out;
  out["ids"] = give<uint64_t>(std::move(found.ids), {n});
  out["words"] = give<uint32_t>(std::move(found.words), {n});
  out["stamps"] = give<uint32_t>(std::move(found.stamps), {stamps});
  out["rows"] = give<uint8_t>(std::move(found.rows), {n, table.options().row_bytes()});
  out["removed"] = give<uint64_t>(std::move(found.removed), {removed});
  out["sightings"] = give<uint8_t>(std::move(found.sightings), {sightings});
  out["latest_step"] = found.latest_step;
  return out;
}

nb::dict collect_snapshot(Table& table) {
  Image found;
  {
    nb::gil_scoped_release free;
    found = table.collect();
  }
  const size_t n = found.n, stamps = found.stamps.data() ? n : 0;
  const size_t sightings = found.sightings_bytes;
  return give_rows(table, std::move(found), n, stamps, sightings);
}

template <class T>
using Given = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using RowBytes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class T>
std::vector<T> copy_of(const Given<T>& column) {
  return std::vector<T>(column.data(), column.data() + column.shape(0));
}

void restore(Table& table, const Given<uint64_t>& ids, const Given<uint32_t>& words,
             const Given<uint32_t>& stamps, const RowBytes& rows, const Given<uint64_t>& removed,
             const Given<uint8_t>& sightings, uint32_t latest_step, bool keep_present) {
  const size_t n = ids.shape(0);
  require(words.shape(0) == n && rows.shape(0) == n && (stamps.shape(0) == n || !stamps.shape(0)),
          "ids, words, stamps and rows must have one length");
  require(!n || rows.shape(1) == table.options().row_bytes(),
          "rows must have the table's bytes per row");
  Snapshot from;
  from.ids = copy_of(ids);
  from.words = copy_of(words);
  from.stamps = copy_of(stamps);
  from.rows.assign(rows.data(), rows.data() + rows.size());
  from.removed = copy_of(removed);
  from.sightings = copy_of(sightings);
  from.latest_step = latest_step;
  nb::gil_scoped_release free;
  table.restore(from, keep_present);
}

nb::dict lease(Table& table, const Given<uint64_t>& ids, size_t start, size_t stop) {
  require(start <= stop && stop <= ids.shape(0), "start and stop must lie inside ids");
  Snapshot found;
  {
    nb::gil_scoped_release free;
    found = table.lease(ids.data() + start, stop - start);
  }
  const size_t n = found.ids.size(), stamps = found.stamps.size();
  return give_rows(table, std::move(found), n, stamps, 0);
}

}  // namespace

void bind_table(nb::module_& module) {
  nb::class_<Counters>(module, "Counters")
      .def_ro("created", &Counters::created)
      .def_ro("evicted", &Counters::evicted)
      .def_ro("expired", &Counters::expired)
      .def_ro("not_admitted", &Counters::not_admitted)
      .def_ro("gradients_not_admitted", &Counters::gradients_not_admitted)
      .def_ro("gradients_evicted", &Counters::gradients_evicted);

  nb::class_<Table>(module, "Table")
      .def(nb::init<const Options&>(), nb::arg("options"))
      .def("__len__", &Table::size)
      .def("rows", &all_rows)
      .def("freeze", &Table::freeze, nb::arg("only_changed"), nb::arg("track"),
           nb::call_guard<nb::gil_scoped_release>())
      .def("copy_slice", &Table::copy_slice, nb::arg("slots"),
           nb::call_guard<nb::gil_scoped_release>())
      .def("collect", &collect_snapshot)
      .def("settle", &Table::settle, nb::arg("kept"), nb::call_guard<nb::gil_scoped_release>())
      .def("restore", &restore, nb::arg("ids"), nb::arg("words"), nb::arg("stamps"),
           nb::arg("rows"), nb::arg("removed"), nb::arg("sightings"), nb::arg("latest_step"),
           nb::arg("keep_present") = false)
      .def("lease", &lease, nb::arg("ids"), nb::arg("start"), nb::arg("stop"))
      .def_prop_ro("resident_bytes", &Table::resident_bytes)
      .def_prop_ro("counters", &Table::counters);

  module.def("read", &read_rows, nb::arg("tables"), nb::arg("ids"), nb::arg("spans"),
             nb::arg("handles"), nb::arg("writes"), nb::arg("values"), nb::arg("create"),
             nb::arg("step"));
  module.def("refresh", &refresh_rows, nb::arg("tables"), nb::arg("ids"), nb::arg("spans"),
             nb::arg("handles"), nb::arg("writes"), nb::arg("values"), nb::arg("step"));
  module.def("push", &push_rows, nb::arg("tables"), nb::arg("pushes"), nb::arg("step"),
             nb::arg("lrs"), nb::arg("staleness"));
}

}  // namespace embedding
