"""A training loop that reads its data set from S3, or from any server that speaks its protocol.

    python examples/read_s3.py s3://my-bucket/my-states
    python examples/read_s3.py s3://my-bucket/my-states --endpoint-url http://127.0.0.1:7480

Keys come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or, with `pip install 'hsstream[s3]'`, from
wherever the AWS command line has them: profiles, SSO, the role of the machine. They are asked for again
when they expire. `tools/services/ceph.sh start /tmp/ceph` starts a real S3 server to try this on; the same
root, given to `hs.ShardWriter`, is how the data set gets there.
"""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path


def main() -> None:
    """Read the command line; the loop itself is that of read_http.py: only the address differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", help="s3://BUCKET/PREFIX")
    parser.add_argument("--endpoint-url", help="a server other than Amazon's")
    parser.add_argument("--region")
    parser.add_argument("--epochs", type=int, default=1)
    args = parser.parse_args()
    train = runpy.run_path(str(Path(__file__).with_name("read_http.py")))["train"]
    train(args.root, {"endpoint_url": args.endpoint_url, "region": args.region}, args.epochs)


if __name__ == "__main__":
    main()
