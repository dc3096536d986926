"""Which kept results a question may read and write: a job answers for its own question alone."""

from __future__ import annotations

import pytest

from sizer.base.errors import RequestError
from sizer.estimating.scopes import digest_scope, module_scope_of, work_scope_of
from sizer.query.text import parse_query
from sizer.service.access import Access, access_of

RESNET = "arch=torchvision:resnet50&dtype=float32&batch=1"
NAME = "0" * 64


def access(query: str = RESNET, task: str = "estimate") -> Access:
    return access_of(task, query, None, "1")


def test_an_architecture_is_its_name_config_and_versions():
    def of(query, config=None, versions="1"):
        found = access_of("estimate", query, config, versions)
        return found and found.architecture

    resnet = of("arch=torchvision:resnet50&gpu=t4&batch=1")
    assert resnet == of("arch=torchvision:resnet50&dtype=float32")
    different = {
        of("arch=torchvision:resnet18"),
        of("arch=timm:resnet50"),
        of("arch=torchvision:resnet50", versions="2"),
        of("arch=hub:a/b", "{}"),
        of("arch=hub:a/b@main", "{}"),
        of("arch=hub:a/b", '{"a": 1}'),
    }
    assert len(different | {resnet}) == 7
    assert of("arch=nothing:at-all") is None


def test_questions_that_share_tapes_have_the_same_scopes():
    others = ("batch=1,64", "dtype=bfloat16", "gpu=t4", "torch=2.6", "expandable=1", "outputs=kept", "focus=float32:1")
    for change in others:
        key = change.partition("=")[0]
        rest = "&".join(item for item in RESNET.split("&") if not item.startswith(key))
        assert access(f"{rest}&{change}").scopes == access().scopes, change


@pytest.mark.parametrize("change", ["image=64", "optimizer=sgd", "mode=inference", "checkpointing=1", "train=head"])
def test_other_questions_have_other_scopes(change):
    work, module = access(f"{RESNET}&{change}").scopes
    assert work != access().scopes[0]
    assert (module == access().scopes[1]) is (change == "optimizer=sgd")  # the module is the same


def test_passes_that_are_all_alike_share_tapes():
    few, many = (access(f"{RESNET}&train=head&accumulate={passes}").scopes for passes in (2, 64))
    assert few == many


def test_a_job_writes_under_its_own_scopes_alone():
    own, other = access(), access(f"{RESNET}&image=400")
    for scope in own.scopes:
        assert own.stored_name(f"{scope}-{NAME}") == f"{scope}-{NAME}"
    forged = [
        *(f"{scope}-{NAME}" for scope in other.scopes),
        *(f"{scope}/x" for scope in (*own.scopes, *other.scopes)),
        f"{own.scopes[0]}-{NAME}x",
        f"{own.scopes[0]}-../{other.scopes[0]}-{NAME}",
        "x",
        "",
        "/",
    ]
    for name in forged:
        stored = own.stored_name(name)
        assert stored == f"{own.scopes[0]}/{name}"
        assert own.readable({stored: b"1"}) == {name: b"1"}
        for task in ("estimate", "limits"):
            assert access(f"{RESNET}&image=400", task).readable({stored: b"1"}) == {}


def test_a_question_is_given_what_it_can_use():
    own, other = access().scopes[0], access(f"{RESNET}&image=400").scopes[0]
    stored = {f"{own}-{NAME}": b"own", f"{other}-{NAME}": b"other", f"{own}/x": b"mine", f"{other}/x": b"another's"}
    assert access().readable(stored) == {f"{own}-{NAME}": b"own", "x": b"mine"}
    assert access(task="limits").readable(stored) == {
        f"{own}-{NAME}": b"own",
        f"{other}-{NAME}": b"other",
        "x": b"mine",
    }


def test_a_result_under_its_own_scope_goes_before_one_beside():
    limits, name = access(task="limits"), f"{access(f'{RESNET}&image=400').scopes[0]}-{NAME}"
    assert limits.readable({name: b"its own", limits.stored_name(name): b"beside"}) == {name: b"its own"}


def test_scopes_are_those_of_the_request_that_the_job_reads():
    request = parse_query(RESNET)
    assert access().scopes == (digest_scope(work_scope_of(request)), digest_scope(module_scope_of(request)))
    with pytest.raises(RequestError, match="nothing:at-all"):
        parse_query("arch=nothing:at-all")
    assert access("arch=nothing:at-all") is None and access("") is None
