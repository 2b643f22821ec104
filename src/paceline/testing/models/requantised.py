"""A copy of a GGUF file whose matrices have another type."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from paceline.runtime.matmul import dequantise, quantise


def write_requantised(path: str | Path, source: str | Path, type_name: str) -> Path:
    """Write a model again with its Q8_0 matrices as another type, such as "Q4_K"; return the path.

    Those whose columns are no whole blocks of that type stay Q8_0. Needs the package `gguf`.
    """
    import gguf

    reader, wanted = gguf.GGUFReader(source), gguf.GGMLQuantizationType[type_name]
    writer = gguf.GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind = field.types[0]
            writer.add_key_value(field.name, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
    block_columns = gguf.GGML_QUANT_SIZES[wanted][0]
    for tensor in reader.tensors:
        data, kept = np.ascontiguousarray(tensor.data), tensor.tensor_type
        if kept.name == "Q8_0" and int(tensor.shape[0]) % block_columns == 0:
            data, kept = quantise(type_name.lower().replace("_k", "_K"), dequantise("q8_0", data)), wanted
        writer.add_tensor(tensor.name, data, raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)
