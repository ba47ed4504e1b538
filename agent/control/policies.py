"""Keep the owner's policies: what is shown of the answers of one engine, such as a score threshold for the night.

A policy belongs to an artefact: the engine of a regime, or the one in service. So it is switched with the engine, on
the very frame. Nothing sets one but the command `policy`; a new engine has none.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from pydantic import JsonValue

from agent.common.errors import AgentError, CommandError
from agent.common.state_files import parse_state
from agent.config import Config
from agent.contract.commands import PolicyArgs
from agent.state.salvage import Row
from agent.state.store import StateStore
from agent.vision.labels import class_id, class_name
from agent.vision.policy import Policy, Polygon
from agent.vision.task import ServedFrame
from agent.vision.tasks.opening import open_task


class Policies:
    """The policies by artefact. One thread changes them; `show` may be called by any.

    summaries: By artefact, as `summary` returns them; replaced as a whole.
    """

    def __init__(self, config: Config, state: StateStore) -> None:
        self._spec = config.model
        self._task = open_task(config.model)
        self._device = config.mqtt.device
        self._cameras = {camera.name: camera.region for camera in config.every_camera}
        self._state = state
        self._hold(state.read("policies", _parse) or {})

    def show(self, served: ServedFrame) -> ServedFrame:
        """Return an answer as the policy of its engine lets it be shown; without one, the answer itself."""
        policy = self._in_frames.get(served.engine_id)
        if policy is None:
            return served
        result = served.result.shown(policy, served.frame.camera, served.geometry)
        return replace(served, result=result)

    def in_frames(self, artefact: str) -> Policy:
        """Return the policy of an artefact, with masks as shares of the frames; an empty one where none is set."""
        return self._in_frames.get(artefact, Policy())

    def set(self, args: PolicyArgs) -> None:
        """Set the policy of an artefact, take it over from another one, or remove it.

        Raises:
            CommandError: `command.policy` for one that the model, or the cameras, do not allow.
            AgentError: `state.write` where the disk refuses; the policies stay as they were.
        """
        policies = dict(self._stated)
        if args.clear:
            policies.pop(args.artefact, None)
        elif args.like is not None:
            policies[args.artefact] = self._known(args.like)
        else:
            policies[args.artefact] = self._checked(args)
        self._replace(policies)

    def hand_on(self, before: str, artefact: str) -> None:
        """Give an artefact the policy of the one that it was built in place of, from the same calibration.

        Raises AgentError (`state.write`).
        """
        if before in self._stated and artefact not in self._stated:
            self._replace({**self._stated, artefact: self._stated[before]})

    def keep_only(self, artefacts: Collection[str]) -> bool:
        """Remove the policies of all other artefacts; return whether there were any. Raises as `set`."""
        kept = {artefact: policy for artefact, policy in self._stated.items() if artefact in artefacts}
        if len(kept) == len(self._stated):
            return False
        self._replace(kept)
        return True

    def document(self, artefact: str) -> dict[str, JsonValue] | None:
        """Return the policy of an artefact as JSON, with all of its masks; None where none is set."""
        policy = self._stated.get(artefact)
        return self._named(policy) if policy is not None else None

    def summary(self, artefact: str) -> dict[str, JsonValue] | None:
        """Return as `document`, with the number of masks in their place."""
        return self.summaries.get(artefact)

    def taking_over(self, artefact: str) -> dict[str, JsonValue]:
        """Return what an event says of the policy of an engine that takes over: nothing where there is none."""
        summary = self.summary(artefact)
        return {"policy": summary} if summary is not None else {}

    def not_inherited(self, before: str, artefact: str) -> dict[str, JsonValue]:
        """Return what an event says where a new engine lacks the policy of the one before: how to hand it on."""
        if before not in self._stated or artefact in self._stated:
            return {}
        command = f"tared send {self._device} policy artefact={artefact} like={before}"
        return {"policy_before": self.summary(before), "policy_command": command}

    def command(self, artefact: str, score_threshold: float | None, classes: Sequence[int]) -> str:
        """Return the command line that sets these in the policy of an artefact; what it has else stays.

        score_threshold: None: as it is. classes: Numbers of those of interest; empty: as they are.
        """
        stated = self._stated.get(artefact, Policy())
        threshold = score_threshold if score_threshold is not None else stated.score_threshold
        wanted = frozenset(classes) or stated.classes
        words = ["tared", "send", self._device, "policy", f"artefact={artefact}"]
        if threshold is not None:
            words.append(f"score_threshold={threshold:g}")
        if wanted is not None:
            names = [class_name(each, self._spec.labels) for each in sorted(wanted)]
            has_comma = any("," in name for name in names)
            words.append(f"classes={','.join(map(str, sorted(wanted)) if has_comma else names)}")
        if stated.masks:
            words.append(f"masks={json.dumps(_document(stated)['masks'], separators=(',', ':'))}")
        return shlex.join(words)

    def _known(self, artefact: str) -> Policy:
        if artefact not in self._stated:
            known = ", ".join(self._stated) or "no artefact has one yet"
            raise _refusal(f"no policy of '{artefact}'", known, "state the policy itself")
        return self._stated[artefact]

    def _checked(self, args: PolicyArgs) -> Policy:
        """Return the policy that is stated. Raises CommandError (`command.policy`)."""
        spec = self._spec
        if not self._task.policy_keys:
            raise _refusal(
                f"a policy for a model of task {spec.task}",
                "a task whose answers have classes or scores",
                "leave the policy out",
            )
        stated = {"score_threshold": args.score_threshold is not None, "classes": args.classes is not None}
        for key, is_stated in stated.items():
            if is_stated and key not in self._task.policy_keys:
                raise _refusal(
                    f"{key} for a model of task {spec.task}", f"a task whose answers have {key}", "leave it out"
                )
        threshold, least = args.score_threshold, self._task.least_score
        if threshold is not None and threshold < least:
            found = f"score_threshold={threshold:g}"
            expected = f"{least:g} or more, from which on the model spec decodes answers"
            raise _refusal(found, expected, "lower score_threshold in the model spec, or raise that of the policy")
        return Policy(threshold, self._classes(args), self._masks(args))

    def _classes(self, args: PolicyArgs) -> frozenset[int] | None:
        if args.classes is None:
            return None
        labels = self._spec.labels
        try:
            return frozenset(class_id(each, labels) for each in args.classes)
        except AgentError as error:
            raise _refusal(error.found, error.expected, error.remedy) from None

    def _masks(self, args: PolicyArgs) -> Mapping[str, list[Polygon]]:
        if not args.masks:
            return {}
        if "masks" not in self._task.policy_keys:
            raise _refusal(
                f"masks of a model of task {self._spec.task}",
                "a task that finds objects: a mask leaves out those in it",
                "use camera.masks in config.yaml, which paint over the frame",
            )
        names = " or ".join(map(repr, self._cameras))
        if isinstance(args.masks, list):
            if len(self._cameras) > 1:
                found, remedy = "masks that name no camera", 'send masks={"CAMERA": [[[x, y], ...]]}'
                raise _refusal(found, f"masks by camera: {names}", remedy)
            return {next(iter(self._cameras)): list(args.masks)}
        unknown = sorted(args.masks.keys() - self._cameras.keys())
        if unknown:
            raise _refusal(f"masks of camera {unknown[0][:64]!a}", names, "send the masks with the name of a camera")
        return {camera: list(polygons) for camera, polygons in args.masks.items()}

    def _replace(self, policies: Mapping[str, Policy]) -> None:
        rows = [(artefact, json.dumps(_document(policy))) for artefact, policy in policies.items()]
        self._state.replace({"policies": rows})
        self._hold(policies)

    def _hold(self, policies: Mapping[str, Policy]) -> None:
        regions = {camera: region for camera, region in self._cameras.items() if region is not None}
        self._stated = dict(policies)
        self.summaries = {artefact: self._summary(policy) for artefact, policy in policies.items()}
        self._in_frames = {artefact: policy.within(regions) for artefact, policy in policies.items()}

    def _summary(self, policy: Policy) -> dict[str, JsonValue]:
        masks: dict[str, JsonValue] = {"masks": sum(map(len, policy.masks.values()))} if policy.masks else {}
        return {**self._named(replace(policy, masks={})), **masks}

    def _named(self, policy: Policy) -> dict[str, JsonValue]:
        document = _document(policy)
        if policy.classes is not None:
            document["classes"] = [class_name(each, self._spec.labels) for each in sorted(policy.classes)]
        return document


def _refusal(found: str, expected: str, remedy: str) -> CommandError:
    return CommandError("command.policy", found, expected, remedy)


def _document(policy: Policy) -> dict[str, JsonValue]:
    """Return a policy as `_parse` reads it; what it does not state is left out."""
    document: dict[str, JsonValue] = {}
    if policy.score_threshold is not None:
        document["score_threshold"] = policy.score_threshold
    if policy.classes is not None:
        document["classes"] = [*sorted(policy.classes)]
    if policy.masks:
        document["masks"] = {
            camera: [[list(corner) for corner in polygon] for polygon in polygons]
            for camera, polygons in policy.masks.items()
        }
    return document


def _parse(rows: Sequence[Row]) -> dict[str, Policy]:
    """Raises ValueError and the like for what no `set` has written."""
    policies = {}
    for artefact, stated in rows:
        args = PolicyArgs.model_validate({**parse_state(stated), "artefact": artefact})
        classes = frozenset(int(each) for each in args.classes) if args.classes is not None else None
        if isinstance(args.masks, list):
            raise ValueError("masks that name no camera")
        policies[artefact] = Policy(args.score_threshold, classes, args.masks or {})
    return policies
