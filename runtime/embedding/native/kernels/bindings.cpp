// The Python face of the engine: arrays in, arrays filled, the interpreter lock released.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "buffers.hpp"
#include "dedup.hpp"
#include "kernels.hpp"
#include "options.hpp"
#include "pages.hpp"
#include "table.hpp"
#include "threads.hpp"

namespace nb = nanobind;
using namespace embedding;

namespace {

using Ids = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Int32s = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Int64s = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<nb::c_contig, nb::device::cpu>;  // float32 or float64
using ConstMatrix = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using Offsets = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Inverse = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T>
nb::ndarray<nb::numpy, T> give(std::vector<T>&& values, std::initializer_list<size_t> shape) {
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T>(owned->data(), shape, owner);
}

template <class T>
nb::ndarray<nb::numpy, T> give_pages(Pages&& pages, std::initializer_list<size_t> shape) {
  auto* owned = new Pages(std::move(pages));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<Pages*>(p); });
  return nb::ndarray<nb::numpy, T>(owned->data(), shape, owner);
}

struct Buffer {
  void* data;
  size_t bytes;
};

template <class T>
nb::ndarray<nb::numpy, T> empty(size_t rows, size_t columns) {
  const size_t bytes = rows * columns * sizeof(T);
  auto* buffer = new Buffer{take_buffer(bytes), bytes};
  nb::capsule owner(buffer, [](void* p) noexcept {
    auto* held = static_cast<Buffer*>(p);
    give_buffer(held->data, held->bytes);
    delete held;
  });
  return nb::ndarray<nb::numpy, T>(buffer->data, {rows, columns}, owner);
}

nb::object give_floats(std::vector<char>&& bytes, size_t rows, size_t columns, bool wide) {
  auto* owned = new std::vector<char>(std::move(bytes));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<char>*>(p); });
  if (wide) {
    return nb::cast(nb::ndarray<nb::numpy, double>(owned->data(), {rows, columns}, owner));
  }
  return nb::cast(nb::ndarray<nb::numpy, float>(owned->data(), {rows, columns}, owner));
}

void require(bool holds, const char* rule) {
  if (!holds) throw std::invalid_argument(rule);
}

template <class Array>
bool is_wide(const Array& array) {
  return array.dtype() == nb::dtype<double>();
}

template <class Array>
void require_rows(const Array& array, size_t rows, const Options& options, const char* rule) {
  const auto expected = options.wide() ? nb::dtype<double>() : nb::dtype<float>();
  require(array.ndim() == 2 && array.shape(0) >= rows && array.shape(1) == options.dim &&
              array.dtype() == expected,
          rule);
}

constexpr size_t kLeastSamples = 256;  // worth a second thread
constexpr size_t kLeastRows = 2048;

constexpr const char* kValueRule = "values must be [n, dim] of the table's dtype";

nb::tuple plan_ids(const Ids& ids, uint32_t shards, const Int32s& inverse) {
  require(shards >= 1, "shards must be >= 1");
  require(inverse.shape(0) >= ids.shape(0), "inverse must be as long as ids");
  Distinct found;
  {
    nb::gil_scoped_release free;
    found = merge_duplicates(ids.data(), ids.shape(0), shards, inverse.data());
  }
  const size_t distinct = found.ids.size();
  return nb::make_tuple(give(std::move(found.ids), {distinct}),
                        give(std::move(found.bounds), {size_t{shards} + 1}));
}

struct Range {
  size_t start, stop;
};

template <class Array>
Range range_of(const Ids& ids, size_t start, size_t stop, const Int64s& handles,
               const Int64s& writes, const Array& values, const Options& options) {
  require(start <= stop && stop <= ids.shape(0) && handles.shape(0) == ids.shape(0) &&
              writes.shape(0) == ids.shape(0),
          "ids, handles and writes must have one length, and [start, stop) lie in it");
  require_rows(values, ids.shape(0), options, kValueRule);
  return {start, stop};
}

void read_rows(Table& table, const Ids& ids, size_t start, size_t stop, bool create, int64_t step,
          const Int64s& handles, const Matrix& values, const Int64s& writes) {
  range_of(ids, start, stop, handles, writes, values, table.options());
  char* out = static_cast<char*>(values.data()) +
              start * table.options().dim * table.options().compute_bytes();
  nb::gil_scoped_release free;
  table.read(ids.data() + start, stop - start, create, step, handles.data() + start, out,
             writes.data() + start);
}

size_t refresh_rows(Table& table, const Ids& ids, size_t start, size_t stop, int64_t step,
               const Int64s& handles, const Matrix& values, const Int64s& writes) {
  range_of(ids, start, stop, handles, writes, values, table.options());
  char* out = static_cast<char*>(values.data()) +
              start * table.options().dim * table.options().compute_bytes();
  nb::gil_scoped_release free;
  return table.refresh(ids.data() + start, stop - start, step, handles.data() + start, out,
                       writes.data() + start);
}

using PythonPart = std::tuple<Ids, size_t, size_t, Int64s, Int64s, ConstMatrix>;

void push_rows(Table& table, const std::vector<PythonPart>& pushes, int64_t step, double lr,
          const Int64s& staleness) {
  require(staleness.shape(0) == 64, "staleness must have 64 places");
  std::vector<Part> parts;
  for (const auto& [ids, start, stop, handles, writes, gradients] : pushes) {
    range_of(ids, start, stop, handles, writes, gradients, table.options());
    const size_t row = table.options().dim * table.options().compute_bytes();
    parts.push_back({ids.data() + start, handles.data() + start, writes.data() + start,
                     static_cast<const char*>(gradients.data()) + start * row, stop - start});
  }
  nb::gil_scoped_release free;
  table.push(parts, step, lr, staleness.data());
}

nb::tuple all_rows(const Table& table) {
  Rows rows;
  {
    nb::gil_scoped_release free;
    rows = table.rows();
  }
  const size_t n = rows.ids.size();
  const bool wide = table.options().wide();
  return nb::make_tuple(give(std::move(rows.ids), {n}),
                        give_floats(std::move(rows.values), n, table.options().dim, wide),
                        give_floats(std::move(rows.state), n, table.options().state_floats(), wide),
                        give(std::move(rows.writes), {n}));
}

nb::dict give_snapshot(const Table& table, Snapshot found) {
  const size_t n = found.ids.size(), stamps = found.stamps.size();
  const size_t removed = found.removed.size(), sightings = found.sightings.size();
  nb::dict out;
  out["ids"] = give(std::move(found.ids), {n});
  out["words"] = give(std::move(found.words), {n});
  out["stamps"] = give(std::move(found.stamps), {stamps});
  out["rows"] = give(std::move(found.rows), {n, table.options().row_bytes()});
  out["removed"] = give(std::move(found.removed), {removed});
  out["sightings"] = give(std::move(found.sightings), {sightings});
  out["latest_step"] = found.latest_step;
  return out;
}

nb::dict collect_snapshot(Table& table) {
  Image found;
  {
    nb::gil_scoped_release free;
    found = table.collect();
  }
  const size_t n = found.n, removed = found.removed.size();
  const size_t stamps = found.stamps.data() ? n : 0;
  nb::dict out;
  out["ids"] = give_pages<uint64_t>(std::move(found.ids), {n});
  out["words"] = give_pages<uint32_t>(std::move(found.words), {n});
  out["stamps"] = give_pages<uint32_t>(std::move(found.stamps), {stamps});
  out["rows"] = give_pages<uint8_t>(std::move(found.rows), {n, table.options().row_bytes()});
  out["removed"] = give(std::move(found.removed), {removed});
  out["sightings"] = give_pages<uint8_t>(std::move(found.sightings), {found.sightings_bytes});
  out["latest_step"] = found.latest_step;
  return out;
}

template <class T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using RowBytes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class T>
std::vector<T> copy_of(const Column<T>& column) {
  return std::vector<T>(column.data(), column.data() + column.shape(0));
}

void restore(Table& table, const Column<uint64_t>& ids, const Column<uint32_t>& words,
             const Column<uint32_t>& stamps, const RowBytes& rows, const Column<uint64_t>& removed,
             const Column<uint8_t>& sightings, uint32_t latest_step, bool keep_present) {
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

nb::dict lease(Table& table, const Column<uint64_t>& ids, size_t start, size_t stop) {
  require(start <= stop && stop <= ids.shape(0), "start and stop must lie inside ids");
  Snapshot found;
  {
    nb::gil_scoped_release free;
    found = table.lease(ids.data() + start, stop - start);
  }
  return give_snapshot(table, std::move(found));
}

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

NB_MODULE(_kernels, module) {
  module.doc() = "Kernels of the embedding engine; see runtime.embedding.native.store.";
  nb::set_leak_warnings(false);  // types live until the process ends; a warning helps nobody

  nb::enum_<Storage>(module, "Storage")
      .value("f32", Storage::f32)
      .value("f64", Storage::f64)
      .value("f16", Storage::f16)
      .value("bf16", Storage::bf16);
  nb::enum_<OptimizerKind>(module, "OptimizerKind")
      .value("sgd", OptimizerKind::sgd)
      .value("momentum", OptimizerKind::momentum)
      .value("adagrad", OptimizerKind::adagrad)
      .value("adagrad_row", OptimizerKind::adagrad_row)
      .value("adam", OptimizerKind::adam)
      .value("adam_row", OptimizerKind::adam_row)
      .value("ftrl", OptimizerKind::ftrl);
  nb::enum_<Initial>(module, "Initial")
      .value("uniform", Initial::uniform)
      .value("normal", Initial::normal)
      .value("gamma", Initial::gamma)
      .value("poisson", Initial::poisson)
      .value("constant", Initial::constant);
  nb::enum_<Eviction>(module, "Eviction")
      .value("none", Eviction::none)
      .value("lru", Eviction::lru)
      .value("clock", Eviction::clock);
  nb::enum_<Admission>(module, "Admission")
      .value("all", Admission::all)
      .value("probability", Admission::probability)
      .value("frequency", Admission::frequency);

  nb::class_<Options>(module, "Options")
      .def(nb::init<>())
      .def_rw("dim", &Options::dim)
      .def_rw("storage", &Options::storage)
      .def_rw("optimizer", &Options::optimizer)
      .def_rw("initial_accumulator", &Options::initial_accumulator)
      .def_rw("eps", &Options::eps)
      .def_rw("beta1", &Options::beta1)
      .def_rw("beta2", &Options::beta2)
      .def_rw("row_bias_correction", &Options::row_bias_correction)
      .def_rw("weight_decay", &Options::weight_decay)
      .def_rw("momentum", &Options::momentum)
      .def_rw("l1", &Options::l1)
      .def_rw("l2", &Options::l2)
      .def_rw("ftrl_beta", &Options::ftrl_beta)
      .def_rw("weight_bound", &Options::weight_bound)
      .def_rw("key", &Options::key)
      .def_rw("initial", &Options::initial)
      .def_rw("initial_a", &Options::initial_a)
      .def_rw("initial_b", &Options::initial_b)
      .def_rw("eviction", &Options::eviction)
      .def_rw("capacity_rows", &Options::capacity_rows)
      .def_rw("admission", &Options::admission)
      .def_rw("admission_probability", &Options::admission_probability)
      .def_rw("admission_sightings", &Options::admission_sightings)
      .def_rw("admission_counters", &Options::admission_counters)
      .def_rw("expire_after_steps", &Options::expire_after_steps)
      .def_rw("track_changes", &Options::track_changes)
      .def_prop_ro("state_floats", &Options::state_floats)
      .def_prop_ro("row_bytes", &Options::row_bytes);

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
      .def("read", &read_rows, nb::arg("ids"), nb::arg("start"), nb::arg("stop"), nb::arg("create"),
           nb::arg("step"), nb::arg("handles"), nb::arg("values"), nb::arg("writes"))
      .def("refresh", &refresh_rows, nb::arg("ids"), nb::arg("start"), nb::arg("stop"), nb::arg("step"),
           nb::arg("handles"), nb::arg("values"), nb::arg("writes"))
      .def("push", &push_rows, nb::arg("parts"), nb::arg("step"), nb::arg("lr"), nb::arg("staleness"))
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

  module.def("plan", &plan_ids, nb::arg("ids"), nb::arg("shards"), nb::arg("inverse"));
  module.def("pool", &pool_bags, nb::arg("fields"), nb::arg("samples"), nb::arg("offsets"),
             nb::arg("inverse"), nb::arg("rounds"), nb::arg("pooled"), nb::arg("rows"),
             nb::arg("plain_copy"));
  module.def("scatter", &scatter_bags, nb::arg("fields"), nb::arg("samples"), nb::arg("offsets"),
             nb::arg("inverse"), nb::arg("rounds"), nb::arg("pooled"), nb::arg("rows"));
  module.def("empty_float32", &empty<float>, nb::arg("rows"), nb::arg("columns"));
  module.def("empty_float64", &empty<double>, nb::arg("rows"), nb::arg("columns"));
  module.def("empty_int64", &empty<int64_t>, nb::arg("rows"), nb::arg("columns"));
  module.def("empty_int32", &empty<int32_t>, nb::arg("rows"), nb::arg("columns"));
  module.def("idle_buffer_bytes", &idle_buffer_bytes);
  module.def("set_threads", &set_threads, nb::arg("count"),
             nb::call_guard<nb::gil_scoped_release>());
  module.def("threads", &threads);
  module.def("set_memory_limit", &set_memory_limit, nb::arg("bytes"));
  module.def("memory_limit", &memory_limit);
  module.def("kernel_set", [] { return std::string(kernels().name); });
  module.def("choose_kernel_set", [](const std::string& name) {
    if (!choose_kernels(name.c_str())) {
      throw std::invalid_argument("kernel set " + name +
                                  " is not known or not supported by this processor");
    }
  });
}
