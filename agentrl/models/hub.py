"""Uploads of models to the Hugging Face hub, by its own library and with its own login."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.errors import ConfigError, HubError
from agentrl.models.base_model import CARD
from agentrl.models.source import check_weights, is_hub_name

_LOGIN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"
_IDS = re.compile(r"\(Request ID[^)]*\)|\s+")


def push(
    folder: Path, repository: str, *, public: bool = False, revision: str | None = None
) -> str:
    """Commit the files of a model's folder to a repository on the hub, which is made if there is
    none; returns the address of the commit. Other files in the repository stay.

    `public`: whether a new repository is for everybody to read. `revision`: the branch, by default
    main.

    Raises:
        ConfigError: the folder holds no model with a card, the name is none, the hub's library is
            missing, or nobody is logged in. Nothing was sent then.
        HubError: the hub has refused it, or cannot be reached.
    """
    _check_folder(folder)
    if not is_hub_name(repository):
        raise ConfigError(f"{repository!r} is no repository on the hub: write OWNER/NAME")
    try:
        from huggingface_hub import HfApi, constants, get_token
    except ImportError as error:
        raise ConfigError(
            "huggingface_hub is not installed, which talks to the hub: pip install huggingface_hub"
        ) from error
    if constants.HF_HUB_OFFLINE:
        raise ConfigError("HF_HUB_OFFLINE is set, so nothing is sent to the hub: unset it")
    if get_token() is None:
        raise ConfigError(f"nobody is logged in at the hub ({constants.ENDPOINT}): {_LOGIN}")
    api = HfApi(library_name="agentrl")
    with _refusals(repository, constants.ENDPOINT):
        api.whoami()
        api.create_repo(repository, private=not public, exist_ok=True)
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        return str(
            api.upload_folder(
                repo_id=repository,
                folder_path=folder,
                commit_message="Upload a model trained with agentrl",
                revision=revision,
            ).commit_url
        )


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{str(folder)!r} is not the folder of a model (it has no config.json): name one that"
            " `agentrl export RUN FOLDER` has written"
        )
    check_weights(folder, str(folder), setting="push-to-hub")
    if not (folder / CARD).is_file():
        raise ConfigError(
            f"{folder} has no card ({CARD}), and nobody could tell there what the model is: name a"
            " folder that `agentrl export` has written, or write one"
        )


@contextmanager
def _refusals(repository: str, address: str) -> Iterator[None]:
    """Turn what the hub's library raises into a sentence.

    Raises:
        HubError: the hub has refused something, or cannot be reached.
    """
    from huggingface_hub.errors import HfHubHTTPError

    # The base of all errors of the HTTP library that this version of the hub's is built on.
    transport: type[Exception] = HfHubHTTPError.__bases__[0]
    try:
        yield
    except HfHubHTTPError as error:
        said = _IDS.sub(" ", error.server_message or str(error)).strip()[:300]
        why = _reason(error.response.status_code, address, said)
        raise HubError(f"{repository} was not uploaded: {why}") from error
    except ValueError as error:  # the metadata of the card, or the name
        said = _IDS.sub(" ", str(error)).strip()[:300]
        raise HubError(f"{repository} was not uploaded: {said}") from error
    except (transport, OSError, RuntimeError) as error:
        raise HubError(
            f"{repository} was not uploaded: the connection to the hub at {address} failed"
            f" ({error.__cause__ or error}). HF_ENDPOINT has the address of another one"
        ) from error


def _reason(code: int, address: str, said: str) -> str:
    match code:
        case 401:
            return f"the hub at {address} does not know the token: {_LOGIN}"
        case 403:
            return f"the account may not write there: {said}"
        case _:
            return f"the hub at {address} answered {code}: {said}"
