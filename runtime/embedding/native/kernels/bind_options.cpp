// What a table is, told by Python.
#include <nanobind/nanobind.h>

#include "bind_arrays.hpp"
#include "options.hpp"

namespace embedding {

void bind_options(nb::module_& module) {
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
}

}  // namespace embedding
