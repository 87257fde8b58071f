"""A good manifest in which every field of the models is set, and of Kubernetes' free parts those that users have."""

from __future__ import annotations

from typing import Any

import yaml

EVERY_FIELD: dict[str, Any] = yaml.safe_load("""
apiVersion: dataloading.dev/v1alpha1
kind: DataLoaderJob
metadata:
  name: mnist
  labels: {team: vision}
  annotations: {example.com/owner: somebody}
spec:
  ray:
    managed:
      version: 2.60.0
      tuning:
        workerRegisterTimeoutSeconds: 120
        healthCheck: {initialDelayMs: 5000, periodMs: 5000, timeoutMs: 20000, failureThreshold: 6}
      tasks: {cpus: 2, objectStore: 1Gi}
      head:
        resources: {requests: {cpu: 500m, memory: 2Gi}, limits: {cpu: "2", memory: 2Gi}}
        metadata: {labels: {a: b}, annotations: {a: b}}
        template:
          metadata: {labels: {a: b}, annotations: {a: b}}
          spec:
            nodeSelector: {pool: cpu}
            priorityClassName: high
            restartPolicy: Always
            hostNetwork: false
            tolerations: [{key: cpu, operator: Exists, effect: NoSchedule}]
            volumes: [{name: cache, emptyDir: {}}]
            containers:
              - name: head
                env: [{name: A, value: "1"}]
                volumeMounts: [{name: cache, mountPath: /cache}]
  feeders:
    replicas: 2
    minAvailable: 0
    processesPerPod: 2
    autoscaling: {mode: Auto, minReplicas: 1, maxReplicas: 8, costCeiling: 16}
    resources: {requests: {cpu: "1", memory: 2Gi}, limits: {cpu: "1", memory: 2Gi}}
    scratch: {size: 20Gi}
    image: example/feeder:1
    metadata: {labels: {a: b}, annotations: {a: b}}
    template:
      metadata: {labels: {a: b}, annotations: {a: b}}
      spec:
        hostNetwork: false
        restartPolicy: Always
        securityContext: {runAsUser: 1000, fsGroup: 1000}
        imagePullSecrets: [{name: pull}]
        affinity:
          nodeAffinity:
            requiredDuringSchedulingIgnoredDuringExecution:
              nodeSelectorTerms: [{matchExpressions: [{key: pool, operator: In, values: [cpu]}]}]
        volumes: [{name: cache, emptyDir: {}}]
        initContainers: [{name: warm, image: "example/warm:1"}]
        containers:
          - name: feeder
            env: [{name: OMP_NUM_THREADS, value: "1"}]
            envFrom: [{configMapRef: {name: settings}}]
            ports: [{name: debug, containerPort: 7000}]
            volumeMounts: [{name: cache, mountPath: /cache}]
            securityContext: {runAsUser: 1000}
          - name: other
            image: example/other:1
            command: [sleep]
            args: [infinity]
  sidecar:
    image: example/sidecar:1
    scratch: {volume: {ephemeral: {volumeClaimTemplate: {spec: {
      accessModes: [ReadWriteOnce], resources: {requests: {storage: 40Gi}}}}}}}
    metricsPort: 9500
    resources: {requests: {cpu: 250m}, limits: {cpu: "2", memory: 4Gi}}
    env: [{name: A, value: "1"}]
    securityContext: {runAsUser: 1000}
  trainers:
    job:
      replicas: 2
      processesPerPod: 2
      masterPort: 29501
      metadata: {labels: {kueue.x-k8s.io/queue-name: q}, annotations: {a: b}}
      failurePolicy:
        maxRestarts: 3
        backoffSeconds: 10
        ignoreDisruptions: true
        rules: [{onExitCodes: [2, 3], action: FailJob}]
      template:
        metadata: {labels: {a: b}, annotations: {a: b}}
        spec:
          restartPolicy: Never
          hostNetwork: false
          hostIPC: false
          serviceAccountName: default
          automountServiceAccountToken: false
          priorityClassName: high
          schedulerName: default-scheduler
          terminationGracePeriodSeconds: 60
          nodeSelector: {pool: gpu}
          securityContext: {runAsUser: 1000, runAsGroup: 1000, fsGroup: 1000, supplementalGroups: [2000]}
          imagePullSecrets: [{name: pull}]
          tolerations: [{key: gpu, operator: Equal, value: "yes", effect: NoSchedule}]
          hostAliases: [{ip: 10.1.2.3, hostnames: [storage]}]
          dnsConfig: {options: [{name: ndots, value: "2"}]}
          topologySpreadConstraints:
            - {maxSkew: 1, topologyKey: zone, whenUnsatisfiable: ScheduleAnyway, labelSelector: {matchLabels: {a: b}}}
          affinity:
            podAffinity:
              requiredDuringSchedulingIgnoredDuringExecution:
                - {topologyKey: rack, labelSelector: {matchLabels: {a: b}}}
          volumes:
            - {name: code, configMap: {name: code, items: [{key: train.py, path: train.py}]}}
            - {name: claim, persistentVolumeClaim: {claimName: images}}
          initContainers:
            - name: prepare
              image: example/prepare:1
              command: ["true"]
              resources: {requests: {cpu: "1"}, limits: {cpu: "1"}}
              volumeMounts: [{name: code, mountPath: /code}]
          containers:
            - name: trainer
              image: example/mnist:1
              imagePullPolicy: IfNotPresent
              workingDir: /code
              command: [python, train.py]
              args: [--lr, "1"]
              env:
                - {name: A, value: "1"}
                - {name: B, valueFrom: {secretKeyRef: {name: s, key: k}}}
              envFrom: [{secretRef: {name: s}}]
              ports: [{name: nccl, containerPort: 7001, protocol: TCP}]
              resources:
                requests: {cpu: "4", memory: 8Gi, nvidia.com/gpu: "1"}
                limits: {cpu: "4", memory: 8Gi, nvidia.com/gpu: "1"}
                claims: []
              volumeMounts: [{name: code, mountPath: /code, readOnly: true}, {name: claim, mountPath: /claim}]
              securityContext: {runAsNonRoot: true, capabilities: {drop: [ALL]}}
              livenessProbe: {exec: {command: ["true"]}, periodSeconds: 30}
              lifecycle: {preStop: {exec: {command: ["true"]}}}
            - name: logs
              image: example/logs:1
  loader:
    prefetch: 16
    memoryPerProcess: 1Gi
    poolSize: 512Mi
    checksum: true
    allowPickle: false
    batchTimeoutSeconds: 300
    warnAfterSeconds: 30
  data:
    volumes: [{name: images, nfs: {server: s, path: /p}}]
    volumeMounts: [{name: images, mountPath: /data, readOnly: true}]
    env: [{name: ROOT, value: /data}]
    envFrom: [{secretRef: {name: bucket}}]
  startupDeadlineSeconds: 900
  activeDeadlineSeconds: 86400
  networkPolicy: {mode: Ingress}
  ttlSecondsAfterFinished: 3600
  suspend: false
  managedBy: dataloading.dev/operator
""")
