"""What a person asks for by the page is seen in the picture and said in a receipt."""

from pathlib import Path

import av
import pytest

from tests.serve.browser.conftest import OpenPage

pytestmark = pytest.mark.lab


def test_a_typed_prompt_changes_the_picture(open_page: OpenPage) -> None:
    watched = open_page()
    watched.until_it_plays()
    watched.send("a red circle, slow, on black")
    watched.until("red", lambda: watched.share_of("red") > 0.02 > watched.share_of("green"))
    watched.send("a green square, slow, on black")
    watched.until("green", lambda: watched.share_of("green") > 0.02 > watched.share_of("red"))
    watched.until_shown()
    assert watched.complaints == []


def test_a_hard_cut_begins_an_epoch(open_page: OpenPage) -> None:
    watched = open_page()
    watched.until_it_plays()
    watched.until("a chunk", lambda: "epoch" in watched.text("#mode"))
    before = watched.epoch
    watched.page.keyboard.press("x")
    watched.until_shown()
    watched.until("a new epoch", lambda: watched.epoch == before + 1)
    watched.until_it_moves()


def test_a_prompt_comes_in_softly_over_chunks(open_page: OpenPage) -> None:
    watched = open_page()
    watched.until_it_plays()
    watched.page.locator("input[name=change][value=soft]").check()
    watched.page.fill("#soft-chunks", "2")
    with watched.page.expect_request("**/commands*") as sent:
        watched.send("a blue square, slow, on black", "soft")
    asked = sent.value.post_data_json["transition"]
    assert asked == {"chunks": 2, "method": "slerp", "bias_floor": 0.3}
    watched.until("blue", lambda: watched.share_of("blue") > 0.02)
    watched.until_shown()


def test_rewind_shows_the_past_again(open_page: OpenPage) -> None:
    watched = open_page()
    watched.until_it_plays()
    watched.send("a red circle, slow, on black", "cut")
    watched.until("red", lambda: watched.share_of("red") > 0.02)
    watched.until_shown()
    chunk = watched.chunk + 1
    watched.until("chunks to return to", lambda: watched.chunk > chunk + 2)
    watched.send("a green square, slow, on black", "cut")
    watched.until("green", lambda: watched.share_of("green") > 0.02)
    later = watched.chunk
    watched.page.fill("#chunk", str(chunk))
    watched.page.click("#rewind")
    watched.until("an earlier chunk", lambda: chunk <= watched.chunk < later)
    watched.until("red again", lambda: watched.share_of("red") > 0.02)


def test_a_recording_can_be_downloaded_and_played(open_page: OpenPage, tmp_path: Path) -> None:
    watched = open_page()
    watched.until_it_plays()
    watched.page.click("#record")
    watched.until("recording", lambda: watched.page.is_visible("#recording-chip"))
    watched.page.wait_for_timeout(2000)
    watched.page.click("#record")
    watched.until("its end", lambda: not watched.page.is_visible("#recording-chip"))
    with watched.page.expect_download() as download:
        watched.page.click("#recordings a")
    file = tmp_path / "take.mp4"
    download.value.save_as(file)
    with av.open(str(file)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(frames) >= 16
    assert frames[0].shape[0] == frames[0].shape[1] >= 64
    assert (frames[0] != frames[-1]).any()


def test_charts_move(open_page: OpenPage) -> None:
    watched = open_page()
    watched.until_it_plays()
    drawn = (
        "[...document.querySelectorAll('.chart .line.main')].map(line => line.getAttribute('d'))"
    )
    before = watched.page.evaluate(drawn)
    watched.until(
        "every chart's line to move",
        lambda: all(
            now != then for now, then in zip(watched.page.evaluate(drawn), before, strict=True)
        ),
    )
    watched.until(
        "frames per second", lambda: watched.text(".chart:first-child .value")[0].isdigit()
    )
    watched.until("stages", lambda: watched.page.locator(".stages li").count() >= 2)
    assert watched.complaints == []


def test_bias_and_seed_are_set_and_answered(open_page: OpenPage) -> None:
    watched = open_page()
    watched.until_it_plays()
    watched.page.focus("#bias")
    watched.page.keyboard.press("Home")
    watched.until_shown()
    assert watched.text("#bias-value") == "0.05"
    watched.page.fill("#seed", "11")
    watched.page.press("#seed", "Enter")
    watched.until("a receipt", lambda: "seed 11" in watched.text("#history li:first-child"))
    watched.until_shown()
    watched.page.focus("#bias")
    watched.page.keyboard.press("End")
    watched.until("the bias of before", lambda: watched.text("#bias-value") == "1.00")


def test_pause_holds_the_picture_and_resume_goes_on(open_page: OpenPage) -> None:
    watched = open_page()
    watched.until_it_plays()
    watched.page.keyboard.press("Space")
    watched.until("a pause", lambda: watched.text("#state") == "Paused")
    watched.page.wait_for_timeout(1500)
    held_HWC = watched.picture()
    watched.page.wait_for_timeout(1500)
    assert (watched.picture() == held_HWC).all()
    watched.page.keyboard.press("Space")
    watched.until("live again", lambda: watched.text("#state") == "Live")
    watched.until_it_moves()


def test_a_scheduled_timeline_is_obeyed_and_survives_a_reload(open_page: OpenPage) -> None:
    watched = open_page()
    watched.until_it_plays()
    watched.page.click("#timeline-add")
    watched.page.keyboard.type("a blue circle, slow, on black")
    watched.page.fill("#timeline input[type=number]", "3")
    watched.page.click("#timeline-run")
    watched.until("blue", lambda: watched.share_of("blue") > 0.02)
    watched.page.reload()
    watched.until_it_plays()
    assert watched.page.input_value("#timeline input[type=text]").startswith("a blue circle")
    with watched.page.expect_download() as download:
        watched.page.click("#timeline-save")
    assert download.value.suggested_filename == "timeline.json"
    watched.page.click("#timeline button:text('Remove')")
    watched.page.set_input_files("#timeline-file", download.value.path())
    watched.until("the loaded entry", lambda: watched.page.locator("#timeline li").count() == 1)


def test_a_refused_command_says_why(open_page: OpenPage) -> None:
    watched = open_page()
    watched.until_it_plays()
    watched.page.fill("#chunk", "1000000")
    watched.page.click("#rewind")
    watched.until(
        "a refusal", lambda: watched.page.get_attribute("#receipt", "data-state") == "refused"
    )
    assert "chunk" in watched.text("#receipt").lower()
