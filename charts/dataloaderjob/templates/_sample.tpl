{{/* A tiny job that needs nothing but this release: (dict "name" "first-job" "namespace" "default" "root" .) */}}
{{- define "dataloaderjob.sample" -}}
apiVersion: dataloading.dev/v1alpha1
kind: DataLoaderJob
metadata:
  name: {{ .name }}
  namespace: {{ .namespace | quote }}
spec:
  {{- with .root.Values.managedBy }}
  managedBy: {{ . }}
  {{- end }}
  ray:
    managed:
      head:
        resources:
          requests: {cpu: 250m, memory: 1Gi}
          limits: {cpu: "1", memory: 2Gi}
  feeders:
    replicas: 1
    resources:
      requests: {cpu: 250m, memory: 1Gi}
      limits: {cpu: "1", memory: 2Gi}
  loader:
    memoryPerProcess: 64Mi
  ttlSecondsAfterFinished: 3600
  trainers:
    job:
      failurePolicy: {maxRestarts: 0}
      template:
        spec:
          securityContext:
            runAsNonRoot: true
            seccompProfile: {type: RuntimeDefault}
          {{- with .root.Values.imagePullSecrets }}
          imagePullSecrets: {{- toYaml . | nindent 12 }}
          {{- end }}
          containers:
            - name: trainer
              image: {{ include "dataloaderjob.image" (dict "image" .root.Values.feederImage "root" .root) }}
              resources:
                requests: {cpu: 250m, memory: 512Mi}
                limits: {cpu: "1", memory: 2Gi}
              securityContext:
                allowPrivilegeEscalation: false
                capabilities: {drop: [ALL]}
              command:
                - python
                - -c
                - |
{{ regexReplaceAll "(?m)^ +$" (.root.Files.Get "files/sample.py" | trim | indent 18) "" }}
{{- end }}

{{/* The namespace of the sample and the test, one in which the operator works. */}}
{{- define "dataloaderjob.sampleNamespace" -}}
{{- if .Values.namespaces }}{{ first .Values.namespaces }}{{ else }}{{ .Release.Namespace }}{{ end -}}
{{- end }}
