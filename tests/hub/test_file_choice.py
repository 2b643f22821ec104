"""Which file of a repository a name means: llama.cpp's rules."""

from __future__ import annotations

import pytest

from paceline.errors import ModelNotFound
from paceline.hub.file_choice import ModelFiles, RepoFile, choose_files, quantisations, split_names


def listing(*paths: str, sizes: dict[str, int] | None = None) -> list[RepoFile]:
    return [RepoFile(path, (sizes or {}).get(path, 100)) for path in paths]


def chosen(
    files: list[RepoFile], quantisation: str | None = None, file: str | None = None, most: int = 10**9
) -> ModelFiles:
    return choose_files(
        files, repo="user/repo", quantisation=quantisation, file=file, fits=lambda model: (model.size or 0) <= most
    )


@pytest.mark.parametrize(
    ("paths", "quantisation", "expected"),
    [
        (("m-Q2_K.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf"), None, "m-Q4_K_M.gguf"),
        (("m-Q2_K.gguf", "m-Q8_0.gguf"), None, "m-Q8_0.gguf"),
        (("README.md", "m-Q2_K.gguf", "m-F16.gguf"), None, "m-Q2_K.gguf"),
        (("m-f16.gguf",), "F16", "m-f16.gguf"),
        (("m-Q4_K_M.gguf", "m-Q4_K_S.gguf"), "q4_k_s", "m-Q4_K_S.gguf"),
        (("m-IQ4_XS.gguf", "m.Q4_0.gguf"), "Q4_0", "m.Q4_0.gguf"),
        (("m-Q4_0_4_4.gguf", "m-Q4_0.gguf"), "Q4_0", "m-Q4_0.gguf"),
        (("mmproj-Q4_K_M.gguf", "imatrix-Q4_K_M.gguf", "mtp-m-Q4_K_M.gguf", "m-Q4_K_M.gguf"), None, "m-Q4_K_M.gguf"),
        (("UD-Q4_K_M/m-UD-Q4_K_M-00002-of-00002.gguf", "UD-Q4_K_M/m-UD-Q4_K_M-00001-of-00002.gguf"), "UD-Q4_K_M",
         "UD-Q4_K_M/m-UD-Q4_K_M-00001-of-00002.gguf"),
        (("Q4_K_M-old/m-F32.gguf", "m-Q4_K_M.gguf"), None, "Q4_K_M-old/m-F32.gguf"),  # the whole path, as llama.cpp looks
    ],
)  # fmt: skip
def test_a_quantisation_is_chosen_as_llama_cpp_chooses(
    paths: tuple[str, ...], quantisation: str | None, expected: str
) -> None:
    """A named one, else Q4_K_M, else Q8_0, else the first; never a projector or a draft."""
    assert chosen(listing(*paths), quantisation).first.path == expected


def test_the_reason_is_said_where_there_was_a_choice() -> None:
    """For a person who wonders why this file."""
    assert "Q4_K_M is the default" in chosen(listing("m-Q4_K_M.gguf")).why
    assert "no Q4_K_M" in chosen(listing("m-Q8_0.gguf")).why


def test_without_q4_k_m_what_does_not_fit_is_skipped() -> None:
    """Q8_0, then the others in order; the smallest if nothing fits. A named file and Q4_K_M are taken anyway."""
    sizes = {"m-F16.gguf": 160, "m-Q5_K_M.gguf": 55, "m-Q6_K.gguf": 66, "m-Q8_0.gguf": 85}
    files = listing(*sizes, sizes=sizes)
    assert chosen(files, most=90).first.path == "m-Q8_0.gguf"
    second = chosen(files, most=70)
    assert second.first.path == "m-Q5_K_M.gguf"
    assert "Q8_0 does not fit" in second.why
    assert chosen(files, most=10).first.path == "m-Q5_K_M.gguf"
    assert "nothing fits" in chosen(files, most=10).why
    assert chosen(files, "F16", most=10).first.path == "m-F16.gguf"
    assert chosen(listing("m-Q4_K_M.gguf", "m-Q2_K.gguf"), most=10).first.path == "m-Q4_K_M.gguf"


def test_all_parts_of_a_split_set_are_chosen_in_order() -> None:
    """Sizes add up; a missing part is an error."""
    files = listing(*(f"m-Q4_K_M-0000{index}-of-00003.gguf" for index in (3, 1, 2)))
    found = chosen(files)
    assert [part.path[9:14] for part in found.parts] == ["00001", "00002", "00003"]
    assert found.size == 300
    with pytest.raises(ModelNotFound, match="00002-of-00003"):
        chosen([each for each in files if "00002-of" not in each.path])


def test_the_names_of_a_split_set_follow_from_one() -> None:
    """For a URL, from which nothing can be listed."""
    assert split_names("m-00002-of-00002.gguf") == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert split_names("m.gguf") == ["m.gguf"]


@pytest.mark.parametrize(
    ("paths", "model", "expected"),
    [
        (("m-Q4_K_M.gguf", "mmproj-BF16.gguf", "mmproj-Q8_0.gguf"), "m-Q4_K_M.gguf", "mmproj-Q8_0.gguf"),
        (("m-F16.gguf", "mmproj-F16.gguf", "mmproj-Q8_0.gguf"), "m-F16.gguf", "mmproj-F16.gguf"),
        (("a/m-Q8_0.gguf", "a/mmproj-F32.gguf", "mmproj-Q8_0.gguf"), "a/m-Q8_0.gguf", "a/mmproj-F32.gguf"),
        (("a/m-Q8_0.gguf", "b/mmproj-Q8_0.gguf"), "a/m-Q8_0.gguf", None),
        (("a/b/m-Q8_0.gguf", "a/mmproj-F16.gguf", "mmproj-Q8_0.gguf"), "a/b/m-Q8_0.gguf", "a/mmproj-F16.gguf"),
        (("m-Q8_0.gguf",), "m-Q8_0.gguf", None),
    ],
)
def test_the_projector_is_chosen_as_llama_cpp_chooses(paths: tuple[str, ...], model: str, expected: str | None) -> None:
    """In the model's folder or nearest above it, then of the nearest number of bits."""
    projector = chosen(listing(*paths), file=model).projector
    assert (projector and projector.path) == expected


def test_what_is_not_there_is_named_with_the_nearest() -> None:
    """A quantisation, a file, a repository without GGUF."""
    files = listing("m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-Q8_0.gguf")
    with pytest.raises(ModelNotFound, match=r"'Q4_K_L'.*did you mean Q4_K_"):
        chosen(files, "Q4_K_L")
    with pytest.raises(ModelNotFound, match="there is Q4_K_M, Q4_K_S, Q8_0"):
        chosen(files, "F64")
    with pytest.raises(ModelNotFound, match=r"did you mean m-Q8_0\.gguf"):
        chosen(files, file="m-Q8.gguf")
    with pytest.raises(ModelNotFound, match="user/repo-GGUF"):
        chosen(listing("config.json", "model.safetensors"))
    with pytest.raises(ModelNotFound, match="no GGUF file of a model"):
        chosen(listing("mmproj-F16.gguf"))


def test_quantisations_are_listed_once() -> None:
    """In the hub's order; a file without one by its name."""
    files = listing(
        "a-Q2_K.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf", "m-Q2_K-v2.gguf", "mmproj-F16.gguf"
    )
    assert quantisations(files) == ["Q2_K", "b-00001-of-00002.gguf", "V2"]
