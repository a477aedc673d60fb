"""What a release refuses to publish, and what it says then."""

import json
import subprocess

import pytest
from releasing import CPU, CU130, REPO_ID, api, contents, refusal


class TestRefuses:
    def test_a_dirty_tree(self, ready, hub):
        ready.pass_gate()
        ready.write("csrc/answer.h", "changed")
        said = refusal(ready, "--publish")
        assert "the working tree is dirty (csrc/answer.h)" in said
        assert contents(hub, "v1") is None

    def test_a_variant_of_a_dirty_tree(self, ready, hub):
        ready.stamp(CPU, **{"source-dirty": True})
        ready.pass_gate()
        assert f"{CPU}: built from a tree with changes" in refusal(ready, "--publish")

    def test_variants_from_different_commits(self, published, hub):
        published.commit()
        published.stamp(CPU)
        published.pass_gate(CPU)
        before = contents(hub, "v1")
        said = refusal(published, "--publish")
        assert "the variants come from different commits" in said
        assert f"{CPU} from {published.git('rev-parse', 'HEAD')[:12]}" in said
        assert contents(hub, "v1") == before

    def test_variants_of_another_commit_than_head(self, ready, hub):
        ready.pass_gate()
        built = ready.variant().commit
        ready.commit()
        assert f"the variants come from {built[:12]}, not from" in refusal(ready, "--publish")
        assert ready.release("--commit", built)[0] == 0

    def test_no_gate_record_at_all(self, ready, hub):
        said = refusal(ready, "--publish")
        assert "no variant has a gate record" in said
        assert CPU in said

    def test_a_record_of_other_files(self, ready, hub):
        ready.pass_gate()
        ready.stamp(CPU, code="# rebuilt since")
        said = refusal(ready, "--publish")
        assert f"{CPU}.gate-2.13.0.json is of another build of it" in said

    def test_a_failed_gate(self, published, hub):
        published.pass_gate(CU130, failed=("gqa backward",))
        said = refusal(published, "--publish")
        assert f"{CU130}: its gate failed (gqa backward) on a device" in said

    def test_a_record_that_lacks_a_check(self, ready, hub):
        path = ready.pass_gate()
        record = json.loads(path.read_text())
        record["checks"] = [c for c in record["checks"] if c["name"] != "norms"]
        path.write_text(json.dumps(record))
        assert "its gate failed (norms)" in refusal(ready, "--publish")

    @pytest.mark.parametrize(
        ("changed", "told"),
        [
            ({"all": ["name", "new"]}, "added: new"),
            ({"all": [], "functions": {}}, "removed: name"),
            (
                {"functions": {"name": "(op_name, x=1)"}},
                "changed: function name(op_name) -> (op_name, x=1)",
            ),
            (
                {"ops": {"answer": "(Tensor x, int n) -> Tensor"}},
                "changed: op answer(Tensor x) -> Tensor -> (Tensor x, int n) -> Tensor",
            ),
            ({"private": {"_f": "()"}}, "added: private function _f"),
            (
                {"dtypes": {"attention cuda": "bfloat16 float16"}},
                "changed: dtypes of attention cuda: bfloat16 -> bfloat16 float16",
            ),
        ],
    )
    def test_an_api_change_without_a_bump(self, published, hub, changed, told):
        for name in (CPU, CU130):
            published.pass_gate(name, api=api(**changed))
        before = contents(hub, "v1")
        said = refusal(published, "--publish")
        assert told in said
        assert "raise general.version in build.toml" in said
        assert contents(hub, "v1") == before

    def test_variants_with_different_apis(self, published, hub):
        published.pass_gate(CU130, api=api(all=["name", "new"]))
        assert f"{CU130} and {CPU} differ in their API" in refusal(published, "--publish")

    def test_a_lower_version(self, published, hub):
        published.replace("build.toml", "version = 1", "version = 2")
        published.commit()
        for name in (CPU, CU130):
            published.stamp(name, version=2)
            published.pass_gate(name, api=api(all=["name", "new"]))
        status, said = published.release("--publish")
        assert status == 0, said
        assert "added: new" in said

        published.git("revert", "--no-edit", "HEAD")
        published.commit()
        for name in (CPU, CU130):
            published.stamp(name, version=1)
            published.pass_gate(name)
        said = refusal(published, "--publish")
        assert "a downgrade: version 1, but v2 is published" in said
        card = contents(hub, "main")["README.md"]
        assert published.release("--publish", "--rebuild-older")[0] == 0
        assert contents(hub, "main")["README.md"] == card  # the newest version's

    def test_an_older_commit(self, published, hub):
        published.release("--publish")
        published.git("reset", "--hard", "-q", "HEAD~1")
        for name in (CPU, CU130):
            published.stamp(name)
            published.pass_gate(name)
        assert "a downgrade: v1 holds" in refusal(published, "--publish")

    def test_version_0(self, ready, hub):
        ready.stamp(CPU, version=0)
        ready.pass_gate()
        assert "version 0; versions start with 1" in refusal(ready, "--publish")
        ready.replace("build.toml", "version = 1", "version = 0")
        ready.commit()
        assert "general.version" in refusal(ready, "--publish")

    def test_a_library_that_not_every_system_loads(self, ready, hub, tmp_path):
        source, library = tmp_path / "new.c", ready.variant().library
        source.write_text("#include <stdlib.h>\nunsigned f(void) { return arc4random(); }\n")
        subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", library], check=True)
        ready.stamp(CPU)
        ready.pass_gate()
        said = refusal(ready, "--publish")
        assert f"{CPU}: manylinux_2_28: needs arc4random of GLIBC_2.36" in said

    def test_a_tampered_file(self, ready, hub):
        ready.pass_gate()
        (ready.build / CPU / "_ops.py").write_text("import os\n")
        assert f"{CPU}: File hash mismatch for _ops.py" in refusal(ready, "--publish")

    def test_a_branch_that_was_made_otherwise(self, ready, hub):
        ready.pass_gate()
        hub.store.add_folder("kernel", REPO_ID, "v1", ready.build / CPU, f"build/{CPU}")
        assert "v1 was not made by `make release`" in refusal(ready, "--publish")

    @pytest.mark.parametrize("card", ["{{ nothing }}", "{% if %}", "---\nlicense: [\n---\n"])
    def test_a_card_that_gives_no_page(self, ready, hub, card):
        ready.write("CARD.md", card)
        ready.commit()
        ready.stamp(CPU)
        ready.pass_gate()
        assert "error: CARD.md: " in refusal(ready, "--publish")

    def test_all_problems_in_one_run(self, ready, hub):
        ready.pass_gate(failed=("norms",))
        ready.write("new.txt", "")
        said = refusal(ready, "--publish")
        assert "dirty" in said
        assert "its gate failed" in said
