"""TLS of the pool's daemons: a user's Secret in their pods, and its authority in the routers'.

Volumes are optional, and an init container looks for the files: of a pod whose Secret is missing
the kubelet tells nobody but its node, of a container that ends it tells everybody. It tries again,
and the kubelet brings what the Secret has by then.
"""

from collections.abc import Sequence
from pathlib import Path

from kimi_operator.desired.labels import Owner
from kimi_operator.desired.names import pool_host
from kimi_operator.observed import Manifest
from kimi_runtime.spec.tls import TlsFiles

TLS_DIR = "/etc/kimistack-tls"
CERTIFICATE, KEY, CA = "tls.crt", "tls.key", "ca.crt"
"""Keys of a Secret of type kubernetes.io/tls as cert-manager writes it, and names of its files."""
CA_FILE = f"{TLS_DIR}/{CA}"
DAEMON_KEYS, ROUTER_KEYS = (CERTIFICATE, KEY, CA), (CA,)
_LOOK = """\
lacks=
for key in {keys}; do test -s {folder}/$key || lacks="$lacks $key"; done
test -z "$lacks" && exit 0
echo "Secret {secret} of namespace {namespace} lacks$lacks; {remedy}" | tee /dev/termination-log >&2
exit 1
"""


def tls_files(owner: Owner) -> TlsFiles:
    """What a daemon's file says of them."""
    folder = Path(TLS_DIR)
    return TlsFiles(
        certificate=folder / CERTIFICATE,
        key=folder / KEY,
        ca=folder / CA,
        name=pool_host(owner.name, owner.namespace),
    )


def volume(secret: str, keys: Sequence[str]) -> Manifest:
    """Volume `tls` with these keys of the Secret, readable by the pod's group and nobody else."""
    items = [{"key": key, "path": key} for key in keys]
    source = {"secretName": secret, "items": items, "defaultMode": 0o440, "optional": True}
    return {"name": "tls", "secret": source}


def mount() -> Manifest:
    """Of that volume. A renewed Secret reaches running pods by it."""
    return {"name": "tls", "mountPath": TLS_DIR, "readOnly": True}


def gate(owner: Owner, secret: str, keys: Sequence[str], common: Manifest) -> Manifest:
    """The init container that passes once the Secret has these keys, and says which it lacks.

    `common` is its image, with pull policy, and its security context.
    """
    host = pool_host(owner.name, owner.namespace)
    remedy = (
        f"write a certificate made out to {host}, its key and the CA that signed it (cert-manager "
        f"adds {CA} where the issuer has a CA), or remove security.tlsSecretName"
    )
    script = _LOOK.format(
        keys=" ".join(keys),
        folder=TLS_DIR,
        secret=secret,
        namespace=owner.namespace,
        remedy=remedy,
    )
    return {
        "name": "certificates",
        **common,
        "command": ["/bin/sh", "-c", script],
        "volumeMounts": [mount()],
    }
