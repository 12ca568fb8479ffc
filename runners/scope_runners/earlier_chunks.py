"""The chunks of a resumed stream that earlier processes made: read from its log when it is told of.

Held from the start, they would take more and more room, each time that a long stream is resumed.
"""

from collections.abc import Iterator
from pathlib import Path

from scope_contracts.log_records import Durable, Finished
from scope_rt.record.progress import StreamProgress
from scope_rt.record.reader import entries_again
from scope_runners.chunk_record import ChunkRecord


def earlier_chunks(log: Path, progress: StreamProgress) -> Iterator[ChunkRecord]:
    """Those that are in the video, in order, where `progress` is how far it was.

    Raises:
        UserInputError: the log cannot be read any more, or is damaged.
    """
    shown: dict[int, Finished] = {}
    for entry in entries_again(log, progress):
        match entry.record:
            case Finished(chunk_index=index):
                shown[index] = entry.record
            case Durable(chunk_index=index, segment=segment):
                # What was encoded and is made again lies in another segment.
                is_in_video = progress.encoded.number_of(index) == segment
                if is_in_video and (finished := shown.pop(index, None)):
                    yield ChunkRecord.logged(finished).encoded(entry.record.encode_ms)
