// sharing: memory shared between processes, as Python objects.
#pragma once

#include <pybind11/pybind11.h>

namespace memsaver::python {

// Adds the classes Importer and ForeignSpan and their related functions to the module.
void define_sharing(pybind11::module_& m);

}  // namespace memsaver::python
