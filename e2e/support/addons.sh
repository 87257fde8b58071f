#!/usr/bin/env bash
# Puts other projects' controllers on a running kind cluster, from their own releases: --name CLUSTER jobset|trainer...
# E2E_ADDONS names another program for it, where neither GitHub nor registries can be reached.
set -euo pipefail
cluster=kind
if [[ $1 == --name ]]; then cluster=$2; shift 2; fi
kube() { kubectl --context "kind-$cluster" "$@"; }
for addon in "$@"; do
  case $addon in
    jobset)
      kube apply --server-side -f https://github.com/kubernetes-sigs/jobset/releases/download/v0.10.1/manifests.yaml
      kube -n jobset-system wait --for=condition=Available deployment --all --timeout=180s
      ;;
    trainer)
      kube apply --server-side -k 'https://github.com/kubeflow/trainer.git/manifests/overlays/manager?ref=v2.0.0'
      kube -n kubeflow-system wait --for=condition=Available deployment --all --timeout=180s
      ;;
    *)
      echo "unknown: $addon; there are jobset and trainer" >&2
      exit 2
      ;;
  esac
done
