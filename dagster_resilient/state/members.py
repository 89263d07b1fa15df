"""Sets of finished members: one create-only record per member.

So 10,000 items cost 10,000 small objects, not a list that is written 10,000 times.
"""

from __future__ import annotations

import re

from dagster_resilient.errors import IntegrityError
from dagster_resilient.state.records import Member
from dagster_resilient.state.store import RecordStore
from dagster_resilient.storage import keys


class MemberSet:
    """The finished members of one epoch of a task, under ``<prefix>/<epoch>/<member>.g<k>.json``.

    The first record of a member stands. Where its objects were lost later, the member is committed again under the next
    ``g``, and the highest stands.
    """

    def __init__(self, records: RecordStore, prefix: str, epoch: int) -> None:
        self._records = records
        self._prefix = f"{prefix}/{keys.numbered(epoch)}/"

    def _key(self, member: str, g: int) -> str:
        return f"{self._prefix}{keys.encode_segment(member)}.g{g:04d}.json"

    def add(self, record: Member, g: int = 0) -> Member:
        """Commit a member; return the record that stands, which another attempt may have written first."""
        key = self._key(record.member, g)
        if self._records.create(key, record):
            return record
        standing = self._records.get(key, Member)
        if standing is None:
            raise IntegrityError(
                f"{self._records.url}/{key} was refused as present, but is absent: records are never deleted."
            )
        return standing

    def finished(self) -> dict[str, Member]:
        """Return the members that stand, by name, in order of their keys."""
        newest: dict[str, tuple[int, str]] = {}
        for info in self._records.list(self._prefix):
            match = re.fullmatch(r"(.+)\.g(\d{4})\.json", info.key.removeprefix(self._prefix))
            if match and int(match[2]) >= newest.get(match[1], (-1, ""))[0]:
                newest[match[1]] = (int(match[2]), info.key)
        records = (self._records.get(key, Member) for _, key in newest.values())
        return {record.member: record for record in records if record is not None}
