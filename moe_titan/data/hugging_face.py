"""Corpora read through the Hugging Face `datasets` library: Parquet files, local dataset folders and the hub."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets

from moe_titan.data.source import RandomAccessSource, Source, StreamingSource, text_of

if TYPE_CHECKING:
    from moe_titan.config.sections import Training

# torchtitan's names: split of allenai/c4, configuration "en".
_C4_SPLITS = {"c4": "train", "c4_validation": "validation"}


class MappedDataset(RandomAccessSource):
    """A dataset in memory-mapped Arrow files, its text in the column `text_key`."""

    def __init__(self, dataset: datasets.Dataset, text_key: str) -> None:
        if text_key not in dataset.column_names:
            raise ValueError(
                f"training.text_key = {text_key!r}: the dataset has no such column. Set training.text_key to one of "
                f"{dataset.column_names}."
            )
        self._dataset = dataset.select_columns([text_key])
        self._text_key = text_key

    def __len__(self) -> int:
        return len(self._dataset)

    def document(self, index: int) -> str:
        return text_of(self._dataset[index], self._text_key, f"row {index} of the dataset")


class StreamedDataset(StreamingSource):
    """A dataset that is fetched while it is read, its text under `text_key`."""

    def __init__(self, dataset: datasets.IterableDataset, text_key: str) -> None:
        self._dataset = dataset
        self._text_key = text_key

    def documents(self, start: int) -> Iterator[str]:
        for number, record in enumerate(self._dataset.skip(start), start):
            yield text_of(record, self._text_key, f"record {number} of the dataset")


def parquet_source(training: Training, files: Sequence[Path]) -> MappedDataset:
    """Parquet files as one dataset. Their text is copied once, as Arrow, to the cache of `datasets` (HF_HOME), because
    Parquet cannot be read in random order at speed.

    Raises:
        ValueError: a file cannot be read or has no column `training.text_key`.
    """
    # Without batch_size, a file without rows is an error.
    options = {"data_files": [str(file) for file in files], "columns": [training.text_key], "batch_size": 1000}
    return MappedDataset(_load(training, "parquet", split="train", **options), training.text_key)


def named_source(training: Training) -> Source:
    """The Hugging Face dataset `training.dataset`, found in `training.dataset_path` if that is set. What is not on the
    local disk, and C4, is streamed.

    Raises:
        ValueError: `datasets` cannot load it, or it has no column `training.text_key`.
    """
    path = training.dataset_path or training.dataset
    configuration, split, streaming = training.dataset_config, training.dataset_split, not Path(path).exists()
    if training.dataset in _C4_SPLITS:
        path = training.dataset_path or "allenai/c4"
        configuration, split, streaming = configuration or "en", _C4_SPLITS[training.dataset], True
    dataset = _load(training, path, name=configuration, split=split, streaming=streaming)
    return (StreamedDataset if streaming else MappedDataset)(dataset, training.text_key)


def _load(training: Training, path: str, **options: Any) -> Any:
    try:
        return datasets.load_dataset(path, **options)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"training.dataset = {training.dataset!r}, dataset_path = {training.dataset_path!r}, dataset_config = "
            f"{training.dataset_config!r}, dataset_split = {training.dataset_split!r}, text_key = "
            f"{training.text_key!r}: datasets.load_dataset({path!r}) finds no such data. "
            f"Correct the key that its message is about: {error.__cause__ or error}"
        ) from error
