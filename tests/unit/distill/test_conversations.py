"""What a target has written outlives whoever wrote it down, as far as it is whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edge_spec.distill.conversations import Conversation, ConversationFile, count_answered


def _said(count: int, is_held_out: bool = False) -> Conversation:
    return Conversation(np.arange(count, dtype=np.int32), 2, is_held_out)


def test_conversations_come_back_in_the_order_of_their_tasks(tmp_path: Path) -> None:
    file = ConversationFile(tmp_path)
    for task, found in (
        (1, _said(7, True)),
        (0, _said(5)),
        (2, None),
        (3, _said(9)),
        (5, _said(4)),
    ):
        file.add(task, found)
    file.close()
    again = ConversationFile(tmp_path)
    found = again.until(10**6)
    assert [len(each.tokens) for each in found] == [5, 7, 9]  # task 4 is not done
    assert [each.is_held_out for each in found] == [False, True, False]
    assert [len(each.tokens) for each in again.until(4)] == [5, 7]
    assert count_answered(found) == 3 + 5 + 7
    assert again.has(2) and not again.has(4)
    again.close()


def test_what_a_kill_cut_off_is_asked_again(tmp_path: Path) -> None:
    file = ConversationFile(tmp_path)
    file.add(0, _said(5))
    file.add(1, _said(6))
    file.close()
    log = tmp_path / "answers.jsonl"
    log.write_bytes(log.read_bytes()[:-9])
    again = ConversationFile(tmp_path)
    assert again.has(0) and not again.has(1)
    again.add(1, _said(8))
    again.close()
    last = ConversationFile(tmp_path)
    assert [len(each.tokens) for each in last.until(100)] == [5, 8]
    last.close()
