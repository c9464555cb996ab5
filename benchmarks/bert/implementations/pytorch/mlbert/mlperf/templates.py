"""Description of a machine that was not measured yet: ``systems/templates/<system>.json``.

Official tools look at ``systems/*.json`` only, so a template never passes for a description. What its owner has to say
begins with ``FILL IN``; copied beside the real ones as it is, the official checker refuses its ``status`` and
``mlbert submission check`` names every such field.
"""

from __future__ import annotations

from collections.abc import Mapping

FOLDER = "templates"
MARK = "FILL IN"

# Field -> what its owner has to say.
_HINTS = {
    "submitter": "organisation, the same as MLPERF_SUBMISSION_ORG",
    "division": "open or closed, the same as MLPERF_DIVISION",
    "status": "Available on-premise, Available cloud, Preview, or Research, Development, or Internal (RDI)",
    "system_name": "vendor and model, as customers know it",
    "number_of_nodes": "number",
    "host_processors_per_node": "number",
    "host_processor_model_name": "vendor and model",
    "host_processor_core_count": "cores of one processor",
    "host_processor_vcpu_count": "hardware threads of the node, or N/A",
    "host_processor_frequency": "as known, or N/A",
    "host_processor_caches": "as known, or N/A",
    "host_processor_interconnect": "as known, or N/A",
    "host_memory_capacity": "of the node, with unit",
    "host_storage_type": "such as NVMe SSD",
    "host_storage_capacity": "of the node, with unit",
    "host_networking": "kind and speed of the adapters for training",
    "host_networking_topology": "N/A for one node",
    "host_memory_configuration": "modules: number, size, kind and speed",
    "accelerators_per_node": "number",
    "accelerator_model_name": "vendor, model, form and memory",
    "accelerator_host_interconnect": "such as PCIe and its generation",
    "accelerator_frequency": "as known, or N/A",
    "accelerator_on-chip_memories": "as known, or N/A",
    "accelerator_memory_configuration": "kind of memory",
    "accelerator_memory_capacity": "of one accelerator, with unit",
    "accelerator_interconnect": "between the accelerators of a node",
    "accelerator_interconnect_topology": "as known, or N/A",
    "cooling": "air or liquid",
    "hw_notes": "power limit, clocks, anything unusual, or N/A",
    "framework": "PyTorch or TensorFlow and its version, as mlbert submission describe-system prints it",
    "other_software_stack": "driver, CUDA, NCCL, image with digest",
    "operating_system": "name and version",
    "sw_notes": "anything unusual, or N/A",
}
FIELDS = tuple(_HINTS)  # all that the official checker wants, in its order


def template(known: Mapping[str, str]) -> dict[str, str]:
    """The official fields, in their order: what is known (field to value), else what the owner has to say."""
    assert set(known) <= set(FIELDS), set(known) - set(FIELDS)
    return {name: known.get(name) or f"{MARK}: {hint}" for name, hint in _HINTS.items()}


def unfilled(description: Mapping[str, object]) -> list[str]:
    """Fields that still say what their owner has to write."""
    return [name for name, value in description.items() if str(value).startswith(MARK)]
